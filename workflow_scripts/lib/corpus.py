"""All files of a snapshot -> conversations, in an order that file names and order do not change.

Files are read one at a time by their first header's time and session id, so that an original is
supervised before its forks. Kept from file to file: keys of supervised turns, counts, no text.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workflow_scripts.lib import entries, joblog, reading_order
from workflow_scripts.lib.conversations import Tally, conversations_of


@dataclass
class Counts:
    """Counts over all files, complete when the iterator of `read` is exhausted."""

    numbers: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)


def read(
    folder: Path,
    names: list[str],
    leaves: str,
    salvage: bool,
    counts: Counts,
    reject: Callable[[dict], None],
) -> Iterator[dict]:
    """Yield the conversation records of the files `names` below `folder`.

    Each record of something rejected goes to `reject`. Conversation names are made unique.
    """
    headers = {name: entries.first_header(folder / name) for name in names}
    ancestors = reading_order.ancestors_of(headers)
    claimed: set[str] = set()
    taken: Counter = Counter()
    counts.numbers["files"] += len(names)
    ordered = reading_order.ordered(folder, names, headers)
    for name in joblog.track(ordered, "session files"):
        reading = entries.read_file(folder / name, name, salvage)
        rejected = reading.rejected
        for session in reading.sessions:
            session.parents = sorted({*session.parents, *ancestors[name]})
            for record in conversations_of(session, leaves, claimed, counts.tally, rejected):
                label = record["conversation"]
                taken[label] += 1
                if taken[label] > 1:
                    record["conversation"] = f"{label}~{taken[label]}"
                counts.numbers["conversations"] += 1
                yield record
        counts.numbers["sessions"] += len(reading.sessions)
        counts.numbers["lines_read"] += reading.lines_read
        counts.tally.outside["blank"] += reading.blank_lines
        counts.tally.changed.update(reading.repaired)
        for record in rejected:
            counts.numbers["lines_rejected"] += record["lines"]
            counts.reasons[record["reason"]] += 1
            reject(record)


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
