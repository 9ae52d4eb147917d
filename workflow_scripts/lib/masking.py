"""Pieces of a conversation as token ids, with the stretch that is supervised known by construction.

Content is encoded by a copy of the tokenizer that knows no added tokens, so that `<|im_end|>` in a
tool's output stays text; added tokens of the structure become their ids directly. Supervised are
the assistant's text, its tool calls and the token that ends its turn.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from workflow_scripts.lib.chat import Block, Piece

IGNORED = -100  # the label of a token that is not supervised
LONGEST_REMEMBERED = 24  # characters; the template's own texts are short and come again and again
MOST_REMEMBERED = 50_000


class Coder(NamedTuple):
    """A tokenizer in two parts: `plain` for text, `added` for the tokens of the structure."""

    plain: object  # tokenizers.Tokenizer without added tokens
    added: dict[str, int]
    border: re.Pattern
    known: dict[str, list[int]]


class Span(NamedTuple):
    """The tokens of a block; those from `start` up to before `stop` are supervised."""

    kind: str
    ids: list[int]
    start: int
    stop: int
    first_turn: int
    last_turn: int


def coder_of(tokenizer) -> Coder:
    """Take a `tokenizers.Tokenizer` apart.

    Added tokens of blanks alone stay in the plain part: they are spellings, not structure.
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.to_str())
    added = {
        each["content"]: each["id"] for each in state["added_tokens"] if each["content"].strip()
    }
    state["added_tokens"] = [each for each in state["added_tokens"] if each["content"] not in added]
    state["post_processor"] = state["truncation"] = state["padding"] = None
    _forget(state["model"], added)
    longest_first = sorted(added, key=len, reverse=True)
    border = re.compile("(" + "|".join(re.escape(each) for each in longest_first or ["(?!)"]) + ")")
    return Coder(Tokenizer.from_str(json.dumps(state)), added, border, {})


def _forget(model: dict, added: dict[str, int]) -> None:
    """Rename added tokens that the vocabulary holds too, so that no text is ever one of them."""

    def name(token: str) -> str:
        return f"\ue000{added[token]}\ue001" if token in added else token

    if isinstance(model["vocab"], dict):
        model["vocab"] = {name(token): number for token, number in model["vocab"].items()}
    else:  # Unigram: (token, score), a token's place being its number
        model["vocab"] = [[name(token), score] for token, score in model["vocab"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if "".join(pair) not in added]


def segments_of(pieces: Iterable[Piece], coder: Coder) -> Iterator[tuple[str | int, bool]]:
    """Yield texts to encode whole, and ids of structural tokens, each with "is supervised".

    Texts that touch are joined unless one is supervised and the other isn't: a tokenizer sees
    everything between two added tokens as one text, and merges across the borders of our pieces.
    The one border inside such a text is that between an assistant's header and its words, which
    holds in the stock encoding too as long as the words don't open with a line break.
    """
    text, text_supervised = [], False
    for piece in pieces:
        parts = coder.border.split(piece.text) if piece.structure else [piece.text]
        for number, part in enumerate(parts):
            if not part:
                continue
            structural = number % 2 == 1
            if text and (structural or piece.supervised != text_supervised):
                yield "".join(text), text_supervised
                text = []
            if structural:
                yield coder.added[part], piece.supervised
            else:
                text.append(part)
                text_supervised = piece.supervised
    if text:
        yield "".join(text), text_supervised


def encode(blocks: list[Block], coder: Coder) -> list[Span]:
    """Return the tokens of the blocks, encoded in one batch."""
    segmented = [list(segments_of(block.pieces, coder)) for block in blocks]
    wanted = [part for part, _ in chain.from_iterable(segmented) if isinstance(part, str)]
    unknown = list(dict.fromkeys(text for text in wanted if text not in coder.known))
    encodings = coder.plain.encode_batch_fast(unknown, add_special_tokens=False)
    found = {text: encoding.ids for text, encoding in zip(unknown, encodings, strict=True)}
    spans = [
        _span(block, segments, found, coder.known)
        for block, segments in zip(blocks, segmented, strict=True)
    ]
    if len(coder.known) < MOST_REMEMBERED:
        short = ((text, ids) for text, ids in found.items() if len(text) <= LONGEST_REMEMBERED)
        coder.known.update(short)
    return spans


def _span(block: Block, segments: list[tuple], found: dict, known: dict) -> Span:
    ids: list[int] = []
    start = stop = 0
    for part, supervised in segments:
        before = len(ids)
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += found[part] if part in found else known[part]
        if supervised:
            start = start or before
            stop = len(ids)
    return Span(block.kind, ids, start, stop, block.first_turn, block.last_turn)


def labels_of(spans: Iterable[Span]) -> tuple[list[int], list[int]]:
    """Return ids and labels of consecutive spans: a label is its id where supervised, else -100."""
    ids: list[int] = []
    labels: list[int] = []
    for span in spans:
        ids += span.ids
        labels += [IGNORED] * span.start
        labels += span.ids[span.start : span.stop]
        labels += [IGNORED] * (len(span.ids) - span.stop)
    return ids, labels
