"""Encoded conversations as rows of at most `context` tokens, by one of two strategies.

`windows`: consecutive windows, each supervised token supervised in exactly one of them. `turns`:
one row per supervised turn, with all that came before it. Rows open with the system turn.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from workflow_scripts.lib.masking import Coder, Span, labels_of
from workflow_scripts.lib.shortening import shorten

SMALLEST_CONTEXT = 64
SMALLEST_TURN = 8  # tokens of what is left of a turn: with fewer it would lose what frames it
SMALLEST_REPEATED = 2 * SMALLEST_TURN  # tokens: room for a question, and for more beside it
SMALLEST_LEAD = 32  # tokens of a shortened turn; with less room the answer is split instead


class Row(NamedTuple):
    """Token ids and labels of one example, and the first and last turn that it shows."""

    input_ids: list[int]
    labels: list[int]
    first_turn: int
    last_turn: int


class Limits(NamedTuple):
    """`context` and `repeated` (at least SMALLEST_REPEATED) in tokens; `cut` and `dropped` count by
    reason as rows are made.
    """

    context: int
    repeated: int
    coder: Coder
    cut: Counter
    dropped: Counter


def windows(opening: Span, spans: list[Span], limits: Limits) -> Iterator[Row]:
    """Yield consecutive windows over one conversation.

    A window holds as many whole new turns as fit, and ends on a supervised one. It opens with the
    system turn (cut to a quarter of the context where the conversation does not fit) and the most
    recent earlier turns, masked, in at most `limits.repeated` tokens; the last user or tool turn is
    always among what it shows, shortened if need be. Turns never shown before, a long user turn
    say, may take more. A supervised turn that is too long for a window goes on in the next.
    """
    spans = _up_to_last_supervised(spans, limits)
    if not spans or _size([opening, *spans]) <= limits.context:
        yield from [_row([opening, *spans])] if spans else []
        return
    opening = _short_opening(opening, limits)
    room = limits.context - len(opening.ids)
    window: list[Span] = []
    unseen = 0
    for at, span in enumerate(spans):
        if not span.stop:
            continue
        fresh = spans[unseen : at + 1]
        if window and _size(window) + _size(fresh) <= room:
            window += fresh
        else:
            if window:
                yield _row([opening, *window])
            *full, window = _with_lead(spans, at, room, limits)
            yield from (_row([opening, *each]) for each in full)
        unseen = at + 1
    yield _row([opening, *window])


def _with_lead(spans: list[Span], at: int, room: int, limits: Limits) -> list[list[Span]]:
    """Return new windows (without opening) that supervise turn `at`: one, or more if it is long."""
    answer = spans[at]
    first = at  # of the turns that this one answers
    while first and spans[first - 1].kind != "assistant":
        first -= 1
    question = spans[first:at]
    left = room - len(answer.ids)
    asked = _asks(question)
    if asked and _size(question) <= left:
        budget = min(limits.repeated, left - _size(question))
        return [[*_history(spans, first, budget), *question, answer]]
    budget = _lead_budget(left, limits)
    lead = _recent(question, budget, limits) if asked else []
    if not _asks(lead):
        lead = _history_with_question(spans, at, min(limits.repeated, budget), limits)
    if _size(lead) + len(answer.ids) <= room:
        return [[*lead, answer]]
    return _split(spans, at, lead, room, limits)


def _lead_budget(left: int, limits: Limits) -> int:
    return left if left >= min(SMALLEST_LEAD, limits.repeated) else limits.repeated


def _split(spans: list[Span], at: int, lead: list[Span], room: int, limits: Limits) -> list[list]:
    """Return windows over a turn that is longer than one, every token supervised in one of them.

    The second and later ones repeat the last user or tool turn, the turn's header, and the end of
    what was said so far.
    """
    limits.cut["answer-split"] += 1
    answer = spans[at]
    header = answer.ids[: answer.start]
    question = _last_question(spans, at)
    asked = [] if question is None else [spans[question]]
    found = []
    done = answer.start
    while True:
        said = answer.start
        if found:
            lead = _recent(asked, limits.repeated // 2, limits)
            free = limits.repeated - _size(lead) - len(header)
            said = max(answer.start, done - max(0, free))
        start = len(header) + done - said
        stop = start + min(answer.stop - done, room - _size(lead) - start)
        if stop <= start:
            raise _no_room(limits)
        ids = header + answer.ids[said : done + stop - start]
        done += stop - start
        if done == answer.stop:  # and what closes the turn, where it fits
            ids += answer.ids[done : done + room - _size(lead) - stop]
        found.append([*lead, answer._replace(ids=ids, start=start, stop=stop)])
        if done == answer.stop:
            return found


def _history(spans: list[Span], end: int, budget: int) -> list[Span]:
    """The most recent whole turns before `end` within the budget, masked, opening on no result."""
    first = end
    while first and len(spans[first - 1].ids) <= budget:
        first -= 1
        budget -= len(spans[first].ids)
    while first < end and spans[first].kind == "tool":
        first += 1
    return [_masked(span) for span in spans[first:end]]


def _history_with_question(spans: list[Span], end: int, budget: int, limits: Limits) -> list[Span]:
    """The most recent turns before `end` within the budget, the last question among them."""
    at = _last_question(spans, end)
    if at is None:
        return _history(spans, end, budget)
    since = [_masked(span) for span in spans[at:end]]
    if _size(since) <= budget:
        return [*_history(spans, at, budget - _size(since)), *since]
    question = _recent(since[:1], budget // 2, limits)
    recent = _history(since[1:], len(since) - 1, budget - _size(question))
    return [*question, *recent]


def _asks(spans: list[Span]) -> bool:
    return any(span.kind in ("user", "tool") for span in spans)


def _last_question(spans: list[Span], end: int) -> int | None:
    return next((n for n in range(end - 1, -1, -1) if _asks(spans[n : n + 1])), None)


def _recent(spans: list[Span], budget: int, limits: Limits) -> list[Span]:
    """The last of some masked turns within the budget; the very last is shortened if need be."""
    first, left = len(spans), budget
    while first and len(spans[first - 1].ids) <= left:
        first -= 1
        left -= len(spans[first].ids)
    limits.cut["context-turn"] += first
    if first == len(spans) and spans and budget >= SMALLEST_TURN:
        return [shorten(spans[-1], budget, limits.coder)]
    return spans[first:]


def turns(opening: Span, spans: list[Span], limits: Limits, overlong: str) -> Iterator[Row]:
    """Yield one row per supervised turn: everything before it masked, nothing after it.

    overlong: "drop" leaves out a row over the context, as the published study most likely did;
    "cut" drops turns on the left, so that the row does not open on a tool's result where there is
    another way, and cuts the system turn to a quarter. A turn that is too long loses its end.
    """
    spans = _up_to_last_supervised(spans, limits)
    size = len(opening.ids)
    for at, answer in enumerate(spans):
        size += len(answer.ids)
        if not answer.stop:
            continue
        if size <= limits.context:
            yield _row([opening, *map(_masked, spans[:at]), answer])
        elif overlong == "drop":
            limits.dropped["overlong-row"] += 1
            limits.dropped["overlong-row-supervised-tokens"] += answer.stop - answer.start
        else:
            limits.cut["row"] += 1
            yield _cut_on_the_left(opening, spans, at, limits)


def _cut_on_the_left(opening: Span, spans: list[Span], at: int, limits: Limits) -> Row:
    opening, answer = _short_opening(opening, limits), spans[at]
    room = limits.context - len(opening.ids)
    left = room - len(answer.ids)
    first, size = at, left
    while first and len(spans[first - 1].ids) <= size:
        first -= 1
        size -= len(spans[first].ids)
    better = next((n for n in range(first, at) if spans[n].kind != "tool"), first)
    lead = [_masked(span) for span in spans[better:at]]
    if not lead and at:
        lead = _recent([_masked(spans[at - 1])], _lead_budget(left, limits), limits)
    keep = room - _size(lead)
    if len(answer.ids) > keep:
        lost = max(0, answer.stop - keep)
        if lost:
            limits.cut["answer-end"] += 1
            limits.cut["answer-end-supervised-tokens"] += lost
        if keep <= answer.start:
            raise _no_room(limits)
        answer = answer._replace(ids=answer.ids[:keep], stop=min(answer.stop, keep))
    return _row([opening, *lead, answer])


def _no_room(limits: Limits) -> ValueError:
    return ValueError(
        f"context: {limits.context} tokens leave no room for an answer; take more, or less "
        "`repeated_context`"
    )


def _up_to_last_supervised(spans: list[Span], limits: Limits) -> list[Span]:
    end = max((n for n, span in enumerate(spans, start=1) if span.stop), default=0)
    if end:
        limits.dropped["turns-after-the-last-supervised"] += len(spans) - end
    else:
        limits.dropped["conversation-without-supervised-turn"] += 1
    return spans[:end]


def _short_opening(opening: Span, limits: Limits) -> Span:
    short = shorten(opening, limits.context // 4, limits.coder)
    limits.cut["system-turn"] += len(short.ids) < len(opening.ids)
    return short


def _masked(span: Span) -> Span:
    return span._replace(start=0, stop=0)


def _size(spans: list[Span]) -> int:
    return sum(len(span.ids) for span in spans)


def _row(spans: list[Span]) -> Row:
    return Row(*labels_of(spans), spans[1].first_turn, spans[-1].last_turn)
