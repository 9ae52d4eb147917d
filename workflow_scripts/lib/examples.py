"""Conversation records to rows of token ids and labels, in batches, and the figures of the rows."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from workflow_scripts.lib import masking, shortening, windows
from workflow_scripts.lib.chat import Block, Chat, blocks_of, messages_of, opening_of
from workflow_scripts.lib.masking import Coder, Span

CHARACTERS_AT_A_TIME = 4_000_000  # of text in a batch: enough for all cores, small in memory
BINS = 24
QUANTILES = {"min": 0.0, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


class Choices(NamedTuple):
    """How conversations become rows; see `tokenize_and_mask`."""

    context: int
    strategy: str = "windows"
    overlong: str = "cut"
    repeated_context: float = 0.25
    thinking: str = "drop"
    tools: bool = False
    tool_result_tokens: int | None = None
    system_prompt: str = "record"


@dataclass
class Tally:
    """Figures of the rows of one split, gathered as they are made."""

    conversations: int = 0
    lengths: array = field(default_factory=lambda: array("I"))
    supervised_tokens: int = 0
    sessions: Counter = field(default_factory=Counter)
    cut: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    marks: set[bytes] = field(default_factory=set)  # of the tokens of each row


def examples_of(
    records: Iterable[dict],
    chat: Chat,
    coder: Coder,
    choices: Choices,
    tally: Tally,
    known: Set[bytes] = frozenset(),
) -> Iterator[dict]:
    """Yield rows ready to be written, conversation by conversation; `tally` grows with them.

    A row whose mark is `known` is dropped: sessions that share no stretch, no entry and no long
    answer can still hold the same short exchange, and a window may show nothing else.
    """
    limits = windows.Limits(
        context=choices.context,
        repeated=max(windows.SMALLEST_REPEATED, int(choices.context * choices.repeated_context)),
        coder=coder,
        cut=tally.cut,
        dropped=tally.dropped,
    )
    for batch in _batches(records):
        for record, opening, spans in _encoded(batch, chat, coder, choices, tally):
            tally.conversations += 1
            if choices.strategy == "windows":
                rows = windows.windows(opening, spans, limits)
            else:
                rows = windows.turns(opening, spans, limits, choices.overlong)
            for row in rows:
                mark = blake2b(array("i", row.input_ids).tobytes(), digest_size=8).digest()
                if mark in known:
                    tally.dropped["copy-of-a-training-row"] += 1
                    continue
                tally.marks.add(mark)
                tally.lengths.append(len(row.input_ids))
                ignored = row.labels.count(masking.IGNORED)
                tally.supervised_tokens += len(row.labels) - ignored
                tally.sessions[record["session"]] += 1
                yield {
                    "input_ids": row.input_ids,
                    "labels": row.labels,
                    "session": record["session"],
                    "first_turn": row.first_turn,
                    "last_turn": row.last_turn,
                }


def _batches(records: Iterable[dict]) -> Iterator[list[dict]]:
    batch, size = [], 0
    for record in records:
        batch.append(record)
        size += sum(len(turn["text"]) for turn in record["turns"])
        if size >= CHARACTERS_AT_A_TIME:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(
    batch: list[dict], chat: Chat, coder: Coder, choices: Choices, tally: Tally
) -> Iterator[tuple[dict, Span, list[Span]]]:
    turns = [turn for record in batch for turn in record["turns"]]
    turns = shortening.shorten_results(turns, coder, choices.tool_result_tokens, tally.cut)
    found, blocks = [], []
    taken = 0
    for record in batch:
        own = turns[taken : taken + len(record["turns"])]
        taken += len(own)
        blocks_here = _blocks(record, own, chat, choices, tally)
        found.append((record, len(blocks_here)))
        blocks += blocks_here
    spans = iter(masking.encode(blocks, coder))
    for record, count in found:
        opening, *rest = (next(spans) for _ in range(count))
        yield record, opening, rest


def _blocks(
    record: dict, turns: list[dict], chat: Chat, choices: Choices, tally: Tally
) -> list[Block]:
    system = record["system"] if choices.system_prompt == "record" else None
    messages, empty = messages_of(turns, chat.format, choices.thinking)
    if empty:
        tally.dropped["empty-turn"] += empty
    if system is None and messages and messages[0]["role"] == "system":
        # A template takes a first system message for the prompt, wherever it came from.
        first = messages.pop(0)["content"]
        system = first if choices.system_prompt == "record" else None
    opening = opening_of(chat, system, record["tools"] if choices.tools else [])
    return [opening, *blocks_of(messages, chat.format)]


def figures_of(tally: Tally, context: int) -> dict:
    """Return the figures of a split for stats.json; lengths in tokens."""
    lengths = sorted(tally.lengths)
    rows, tokens = len(lengths), sum(lengths)
    counts = sorted(tally.sessions.values())
    return {
        "conversations": tally.conversations,
        "rows": rows,
        "tokens": tokens,
        "supervised_tokens": tally.supervised_tokens,
        "supervised_share": tally.supervised_tokens / tokens if tokens else 0.0,
        "length_quantiles": _quantiles(lengths),
        "rows_per_session": {"sessions": len(counts), **_quantiles(counts)},
        "dropped": _counted(tally.dropped),
        "cut": _counted(tally.cut),
        "length_histogram": _histogram(lengths, context),
    }


def _quantiles(values: list[int]) -> dict[str, int]:
    last = len(values) - 1
    return {name: values[round(share * last)] for name, share in QUANTILES.items() if values}


def _counted(counts: Counter) -> dict[str, int]:
    return {reason: count for reason, count in sorted(counts.items()) if count}


def _histogram(lengths: list[int], context: int) -> list[list[int]]:
    """[low, high, rows]: rows with low < tokens <= high, up to the context."""
    step = -(-context // BINS)
    counts = Counter((length - 1) // step for length in lengths)
    return [[low, min(low + step, context), counts[low // step]] for low in range(0, context, step)]
