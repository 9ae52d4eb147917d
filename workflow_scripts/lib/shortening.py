"""What is too long for its place, cut in the middle and marked: tool results by text, spans by ids.

Only context is ever shortened; an assistant's own words are not.
"""

from collections import Counter

from workflow_scripts.lib.masking import Coder, Span

MARK = "\n[... {} tokens cut ...]\n"
CHARACTERS_AT_A_TIME = 1 << 20  # an encoding takes a hundred bytes a token, so never a huge one
SMALLEST_MARKED = 48  # tokens; below, the mark would push out what it stands in


def shorten_results(
    turns: list[dict], coder: Coder, budget: int | None, cut: Counter
) -> list[dict]:
    """Return the turns with tool results of more than `budget` tokens cut to that many.

    What is left is head and tail in equal parts, whole characters, between them a line that says
    how many tokens are gone; so the result is ordinary text, and encodes as such. `cut` counts
    results and tokens. A budget of None leaves all whole.
    """
    if budget is None:
        return turns
    long = [  # a token is at least a byte
        number
        for number, turn in enumerate(turns)
        if turn["role"] == "tool" and len(turn["text"].encode()) > budget
    ]
    if not long:
        return turns
    turns = list(turns)
    parts = {number: _parts_of(turns[number]["text"]) for number in long}
    encodings = iter(
        coder.plain.encode_batch(
            [part for number in long for part in parts[number]], add_special_tokens=False
        )
    )
    for number in long:
        encoded = [next(encodings) for _ in parts[number]]
        tokens = sum(len(encoding) for encoding in encoded)
        if tokens <= budget:
            continue
        mark = coder.plain.encode(MARK.format(tokens), add_special_tokens=False)
        room = max(2, budget - len(mark))
        head = _head(parts[number][0], encoded[0], room - room // 2)
        tail = _tail(parts[number][-1], encoded[-1], room // 2)
        turns[number] = {**turns[number], "text": head + MARK.format(tokens - room) + tail}
        cut["tool-result"] += 1
        cut["tool-result-tokens"] += tokens - room
    return turns


def _parts_of(text: str) -> list[str]:
    step = CHARACTERS_AT_A_TIME
    return [text[start : start + step] for start in range(0, len(text), step)]


def _head(text: str, encoding, tokens: int) -> str:
    if len(encoding) <= tokens:
        return text
    return text[: encoding.token_to_chars(tokens)[0]]


def _tail(text: str, encoding, tokens: int) -> str:
    if len(encoding) <= tokens:
        return text
    return text[encoding.token_to_chars(len(encoding) - tokens - 1)[1] :]


def shorten(span: Span, budget: int, coder: Coder) -> Span:
    """Return a masked span of at most `budget` tokens: its head and tail, a mark between them.

    Below SMALLEST_MARKED tokens there is no room for a mark. What opens and closes the turn stays.
    """
    if len(span.ids) <= budget:
        return span
    mark: list[int] = []
    if budget >= SMALLEST_MARKED:
        gone = len(span.ids) - budget
        for _ in range(2):  # the mark itself takes room, which changes its number
            text = MARK.format(gone)
            mark = coder.plain.encode(text, add_special_tokens=False).ids
            gone = len(span.ids) - budget + len(mark)
    left = max(0, budget - len(mark))
    tail = left // 2
    head = left - tail
    ids = span.ids[:head] + mark + span.ids[len(span.ids) - tail :]
    return span._replace(ids=ids[:budget], start=0, stop=0)
