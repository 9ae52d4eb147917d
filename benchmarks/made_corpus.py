"""A corpus of any size out of a few session files, repeated and varied.

Every copy has ids, times, numbers and texts of its own, so that nothing is taken for a duplicate or
a fork of another copy, and links within a copy (a fork and its parent) stay.
"""

import json
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

DIGITS = "0123456789"
SHORTEST_VARIED = 24  # characters; what is shorter is a name, a path or a word of pi's own
NAMES = ("parentSession", "branchedFrom")
KEPT = ("type", "id", "parentId", "role", "name", "toolName", "toolCallId", "stopReason", "data")


def session_files(folder: Path) -> list[Path]:
    """Return the session files of a folder, sorted; raises ValueError where there are none."""
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        raise ValueError(f"{folder}: no *.jsonl in it; expected pi session files")
    return found


def make_corpus(sources: list[Path], folder: Path, wanted_bytes: int) -> int:
    """Write copies of the source files into `folder` until there are `wanted_bytes`, at least two.

    Returns the bytes written. A line that is not JSON is copied as it stands.
    """
    folder.mkdir(parents=True)
    lines = {path.stem: list(_values(path)) for path in sources}
    written = 0
    for copy in count():
        digits = random.Random(copy).sample(DIGITS, len(DIGITS))
        table = str.maketrans(DIGITS, "".join(digits))
        for stem, values in lines.items():
            if written >= wanted_bytes and copy > 1:
                return written
            data = b"".join(
                value
                if isinstance(value, bytes)
                else json.dumps(
                    _varied(value, "", copy, table), ensure_ascii=False, separators=(",", ":")
                ).encode("utf-8", "surrogatepass")
                + b"\n"
                for value in values
            )
            (folder / f"{stem}-{copy}.jsonl").write_bytes(data)
            written += len(data)
    raise AssertionError("count() never ends")


def _values(path: Path) -> Iterator[dict | bytes]:
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
            yield value if isinstance(value, dict) else line
        except ValueError:
            yield line


def _varied(value: object, key: str, copy: int, digits: dict) -> object:
    if isinstance(value, dict):
        varied = {name: _varied(each, name, copy, digits) for name, each in value.items()}
        if value.get("type") == "session":
            varied |= {
                name: f"{Path(value[name]).stem}-{copy}"
                for name in ("id", *NAMES)
                if isinstance(value.get(name), str)
            }
        return varied
    if isinstance(value, list):
        return [_varied(each, key, copy, digits) for each in value]
    if key == "timestamp":
        return _later(value, copy)
    if (
        not isinstance(value, str)
        or key in KEPT
        or (len(value) < SHORTEST_VARIED and key != "text")
    ):
        return value
    return f"{copy}. {value.translate(digits)}"


def _later(time: object, minutes: int) -> object:
    if isinstance(time, int):
        return time + 60_000 * minutes
    try:
        later = datetime.fromisoformat(time) + timedelta(minutes=minutes)
    except (TypeError, ValueError):
        return time
    return later.isoformat(timespec="milliseconds").replace("+00:00", "Z")
