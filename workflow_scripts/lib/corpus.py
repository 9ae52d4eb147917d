"""All files of a snapshot -> conversations, in an order that file names and order do not change.

Files are read by their first header's time and session id, so that an original is supervised before
its forks. Processes read files ahead, each as if it were the only one, which is right unless the
file holds turns that an earlier one has claimed; then it is read again here, in its turn. Kept from
file to file: keys of supervised turns, counts, no text.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from workflow_scripts.lib import entries, folders, joblog, pool, reading_order
from workflow_scripts.lib.conversations import Tally, conversations_of

BYTES_AT_A_TIME = 4 << 20  # of files that a process reads as one item
LONGEST_AHEAD = 64 << 20  # bytes that a file's conversations may have to be kept ahead


@dataclass
class Counts:
    """Counts over all files, complete when the iterator of `lines` is exhausted."""

    numbers: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)


class Source(NamedTuple):
    """A file to read: its name, and names of sessions that it was forked from."""

    name: str
    ancestors: frozenset[str]


class Settings(NamedTuple):
    """What holds for all files."""

    folder: Path
    leaves: str
    salvage: bool


class Ahead(NamedTuple):
    """A file read as if it were the only one: (name, JSON) of conversations, keys it claims."""

    conversations: list[tuple[str, bytes]]
    claimed: set[str]
    counts: Counts
    rejected: list[dict]


def _to_json(record: dict) -> bytes:
    try:
        return orjson.dumps(record)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def read(*arguments) -> Iterator[dict]:
    """Yield what `lines` does, parsed."""
    return map(json.loads, lines(*arguments))


def lines(
    folder: Path,
    names: list[str],
    leaves: str,
    salvage: bool,
    counts: Counts,
    reject: Callable[[dict], None],
    processes: int = 1,
) -> Iterator[bytes]:
    """Yield the conversation records of the files `names` below `folder`, each as a line of JSON.

    Each record of something rejected goes to `reject`. Conversation names are made unique.
    """
    headers = {name: entries.first_header(folder / name) for name in names}
    ancestors = reading_order.ancestors_of(headers)
    ordered = reading_order.ordered(folder, names, headers)
    sources = [Source(name, frozenset(ancestors[name])) for name in ordered]
    settings = Settings(folder, leaves, salvage)
    claimed: set[str] = set()
    taken: Counter = Counter()
    counts.numbers["files"] += len(names)
    del headers, ancestors
    reading = _read_ahead(sources, settings, processes)
    for source, ahead in joblog.track(reading, "session files", len(sources)):
        if ahead and claimed.isdisjoint(ahead.claimed):
            found, rejected = ahead.conversations, ahead.rejected
            claimed |= ahead.claimed
            _add(counts, ahead.counts)
        else:
            rejected = []
            found = _conversations(source, settings, claimed, counts, rejected)
        for label, line in found:
            taken[label] += 1
            if taken[label] > 1:
                record = {**json.loads(line), "conversation": f"{label}~{taken[label]}"}
                line = _to_json(record)
            counts.numbers["conversations"] += 1
            yield line + b"\n"
        for record in rejected:
            counts.numbers["lines_rejected"] += record["lines"]
            counts.reasons[record["reason"]] += 1
            reject(record)


def _read_ahead(
    sources: list[Source], settings: Settings, processes: int
) -> Iterator[tuple[Source, Ahead | None]]:
    """Yield each file with what was read ahead of it, if it was."""
    if processes < 2:
        yield from ((source, None) for source in sources)
        return
    groups, size = [[]], 0
    for source in sources:
        own = folders.size_of(settings.folder / source.name)
        if groups[-1] and size + own > BYTES_AT_A_TIME:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += own
    found = pool.in_order(_read_alone, groups, processes, Settings, tuple(settings))
    for group, read_ahead in zip(groups, found, strict=True):
        yield from zip(group, read_ahead, strict=True)


def _read_alone(group: list[Source], settings: Settings) -> list[Ahead | None]:
    """Read files as if each were the only one; None for a file that gives too much to keep."""
    results: list[Ahead | None] = []
    for source in group:
        ahead, size = Ahead([], set(), Counts(), []), 0
        found = _conversations(source, settings, ahead.claimed, ahead.counts, ahead.rejected)
        for label, line in found:
            ahead.conversations.append((label, line))
            size += len(line)
            if size > LONGEST_AHEAD:
                ahead = None
                break
        results.append(ahead)
    return results


def _conversations(
    source: Source, settings: Settings, claimed: set[str], counts: Counts, rejected: list[dict]
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, JSON) of a file's conversations; what was rejected is added to `rejected`."""
    reading = entries.read_file(settings.folder / source.name, source.name, settings.salvage)
    rejected += reading.rejected
    for session in reading.sessions:
        session.parents = sorted({*session.parents, *source.ancestors})
        for record in conversations_of(session, settings.leaves, claimed, counts.tally, rejected):
            yield record["conversation"], _to_json(record)
    counts.numbers["sessions"] += len(reading.sessions)
    counts.numbers["lines_read"] += reading.lines_read
    counts.tally.outside["blank"] += reading.blank_lines
    counts.tally.changed.update(reading.repaired)


def _add(total: Counts, part: Counts) -> None:
    total.numbers.update(part.numbers)
    total.reasons.update(part.reasons)
    for each in dataclasses.fields(Tally):
        count = getattr(part.tally, each.name)
        if isinstance(count, Counter):
            getattr(total.tally, each.name).update(count)
        else:
            setattr(total.tally, each.name, getattr(total.tally, each.name) + count)


def stats_of(counts: Counts) -> dict:
    """Put the counts into the form of stats.json.

    lines_read = lines_used + lines_rejected + lines_outside, or the reader has a bug:
    AssertionError. `rejected` counts records, warnings (which cost no line) among them.
    """
    numbers, tally = counts.numbers, counts.tally
    outside = {why: count for why, count in sorted(tally.outside.items()) if count}
    stats = {
        "files": numbers["files"],
        "sessions": numbers["sessions"],
        "conversations": numbers["conversations"],
        "lines_read": numbers["lines_read"],
        "lines_used": tally.lines_used,
        "lines_rejected": numbers["lines_rejected"],
        "lines_outside": sum(outside.values()),
        "rejected": dict(sorted(counts.reasons.items())),
        "outside": outside,
        "turns": dict(sorted(tally.turns.items())),
        "removed": dict(sorted(tally.removed.items())),
        "unsupervised": dict(sorted(tally.unsupervised.items())),
        "changed": dict(sorted(tally.changed.items())),
        "supervised_turns": tally.supervised_turns,
    }
    parts = stats["lines_used"] + stats["lines_rejected"] + stats["lines_outside"]
    if parts != stats["lines_read"]:
        raise AssertionError(
            f"{stats['lines_read']} lines were read but {parts} accounted for; a bug in the reader"
        )
    return stats
