"""What is known while a session is recorded, and how an entry, an id, a time or a usage is made.

Ids and pauses come from hashes of the session's name, so they are the same in every run.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DOLLARS_PER_TOKEN = {"input": 1e-6, "output": 4e-6, "cacheRead": 1e-7}


@dataclass
class Recording:
    """What is known while a session is played."""

    name: str
    version: int
    folder: Path
    clock: datetime
    model: str = "scripted/scripted-small"
    count: int = 0  # draws so far, so that each hash is a new one
    tip: str | None = None
    context_tokens: int = 900  # the system prompt and the tools
    entries: list[dict] = field(default_factory=list)
    marks: dict[str, tuple[str | None, int]] = field(default_factory=dict)


def append_entry(session: Recording, entry: dict) -> None:
    kind = {"type": entry.pop("type")}
    if session.version > 1:
        new = draw(session, "entry")[:8]
        kind |= {"id": new, "parentId": session.tip}
        session.tip = new
    session.entries.append({**kind, "timestamp": iso_time(session.clock), **entry})


def usage(session: Recording, output: int) -> dict:
    cached = session.context_tokens // 64 * 48
    tokens = {"input": session.context_tokens - cached, "output": output, "cacheRead": cached}
    cost = {kind: round(n * DOLLARS_PER_TOKEN[kind], 8) for kind, n in tokens.items()}
    session.context_tokens += output
    return {
        **tokens,
        "cacheWrite": 0,
        "totalTokens": sum(tokens.values()),
        "cost": {**cost, "cacheWrite": 0, "total": round(sum(cost.values()), 8)},
    }


def call_id(session: Recording) -> str:
    number = int(draw(session, "call"), 16)
    return "toolu_01" + "".join(LETTERS[number // 62**k % 62] for k in range(22))


def draw(session: Recording, what: str) -> str:
    session.count += 1
    return hashlib.sha256(f"{session.name}/{what}/{session.count}".encode()).hexdigest()


def wait(session: Recording, at_least: int, at_most_more: int) -> None:
    milliseconds = at_least + int(draw(session, "pause"), 16) % at_most_more
    session.clock += timedelta(milliseconds=milliseconds)


def read_time(stamp: str) -> datetime:
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)


def iso_time(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time.microsecond // 1000:03d}Z"


def milliseconds(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
