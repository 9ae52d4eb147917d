"""Bytes of a session file -> its sessions with their entries, and a list of what was refused.

Follows pi's own loader (one JSON object between b"\\n" bytes, malformed lines skipped, the first
object must be a session header), but nothing is skipped in silence: every line is counted.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from workflow_scripts.lib import foreign_formats, lines

# What no later stage reads, and what makes lines big: dropped at once to keep memory small.
UNREAD_KEYS = ("usage", "details", "diagnostics")


class Item(NamedTuple):
    """One parsed line: `position` counts parsed lines from the session's header, which is 0."""

    line: int
    position: int
    data: dict
    damaged: bool


@dataclass
class Session:
    """One header and the entries after it; `parents` are session ids or file basenames."""

    file: str
    line: int
    id: str
    timestamp: str
    version: int
    parents: list[str]
    items: list[Item] = field(default_factory=list)


@dataclass
class Reading:
    """What a file held. lines_read = blank + refused lines + headers + lines of the sessions."""

    sessions: list[Session] = field(default_factory=list)
    rejected: list[dict] = field(default_factory=list)
    lines_read: int = 0
    blank_lines: int = 0
    repaired: Counter = field(default_factory=Counter)


def rejection(file: str, line: int | None, reason: str, detail: str, lines: int = 1) -> dict:
    """Build a record of `rejected.jsonl`; `lines` is how many lines it costs, 0 for a warning."""
    return {"file": file, "line": line, "reason": reason, "detail": detail, "lines": lines}


def read_file(path: str | Path, name: str, salvage: bool = False) -> Reading:
    """Read one file; `name` stands for it in all records. Never raises for what the file holds.

    With `salvage`, objects glued on one line are split when each carries its own id, and NUL bytes
    around an object are taken off; without, such lines are rejected, as pi does.
    """
    reading = Reading()
    try:
        with open(path, "rb") as file:
            _read_lines(file, name, salvage, reading)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return _refuse_file(reading, name, "unreadable", f"{reason}; the file is left out")
    return reading


def first_header(path: str | Path) -> dict:
    """Return the first JSON object of a file, or {} where there is none or it can't be read."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                objects, _, _ = lines.parse(lines.bare(raw, number), raw.endswith(b"\n"))
                if objects and isinstance(objects[0], dict):
                    return objects[0]
    except OSError:
        pass
    return {}


def parents_of(header: dict) -> list[str]:
    """Names of the sessions that a header says it was forked from.

    The paths are of the author's machine, so only the basename (or a bare session id) is kept.
    """
    names = []
    for key in ("parentSession", "branchedFrom"):
        value = header.get(key)
        if isinstance(value, str) and value.strip():
            names.append(re.split(r"[/\\]", value.strip().rstrip("/\\"))[-1])
    return sorted(set(names))


def _read_lines(file, name: str, salvage: bool, reading: Reading) -> None:
    session = refused = None
    position = 0
    for number, raw in enumerate(file, start=1):
        reading.lines_read = number
        line = lines.bare(raw, number)
        if not line:
            reading.blank_lines += 1
            continue
        objects, damaged, problem = lines.parse(line, raw.endswith(b"\n"), salvage)
        if problem is None and not all(isinstance(value, dict) for value in objects):
            problem = ("not-an-object", f"{lines.shown(objects[0])} where an object is expected")
        if session is None and refused is None and objects:
            reason = foreign_formats.why_no_session(objects[0])
            if reason:
                reading.lines_read += sum(1 for _ in file)
                _refuse_file(reading, name, *reason)
                return
        if problem:
            position += bool(objects)  # pi counts what it could parse, objects or not
            reading.rejected.append(rejection(name, number, *problem))
            continue
        if damaged:
            reading.repaired["invalid-utf8"] += 1
            detail = "bytes that are not UTF-8 read as U+FFFD; the line is used, not trained on"
            reading.rejected.append(rejection(name, number, "invalid-utf8", detail, lines=0))
        if objects[0].get("type") == "session":
            reason = foreign_formats.why_no_session(objects[0])
            refused = rejection(name, number, *reason) if reason else None
            if refused:
                reading.rejected.append(refused)
            else:
                session = _session(objects[0], name, number)
                reading.sessions.append(session)
                position = 0
            continue
        if refused:
            refused["lines"] += 1
            continue
        if len(objects) > 1:
            reading.repaired["glued-objects"] += 1
        has_image = b'"image"' in line
        for value in objects:
            position += 1
            session.items.append(Item(number, position, _slim(value, has_image), damaged))
    if not reading.sessions and refused is None:
        empty = reading.lines_read == reading.blank_lines
        reason = "empty-file" if empty else "not-json"
        detail = "the file has no lines" if empty else "no line of the file is a JSON object"
        _refuse_file(reading, name, reason, detail)


def _refuse_file(reading: Reading, name: str, reason: str, detail: str) -> Reading:
    """Let one record stand for the whole file, in place of those of its lines."""
    reading.sessions, reading.repaired, reading.blank_lines = [], Counter(), 0
    reading.rejected = [rejection(name, None, reason, detail, reading.lines_read)]
    return reading


def _session(header: dict, name: str, number: int) -> Session:
    timestamp = header.get("timestamp")
    return Session(
        file=name,
        line=number,
        id=header["id"],
        timestamp=timestamp if isinstance(timestamp, str) else "",
        version=foreign_formats.version_of(header),
        parents=parents_of(header),
    )


def _slim(data: dict, has_image: bool) -> dict:
    message = data.get("message")
    if isinstance(message, dict):
        for key in UNREAD_KEYS:
            message.pop(key, None)
    for holder in (data, message) if has_image else ():
        content = holder.get("content") if isinstance(holder, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") == "image":
                block.pop("data", None)
    return data
