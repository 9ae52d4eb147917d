"""Builds pi session files for tests, and runs the reader on them."""

import json
from pathlib import Path

from workflow_scripts.lib import jsonl
from workflow_scripts.read_sessions import read_sessions

_DAY = "2026-01-01T00:00:"


def header(session: str = "s", version: object = 3, second: int = 0, **extra) -> dict:
    made = {"type": "session", "id": session, "timestamp": f"{_DAY}{second:02d}Z", "cwd": "/w"}
    if version is not None:
        made["version"] = version
    return made | extra


def entry(kind: str, name: str | None, parent: str | None, **extra) -> dict:
    """An entry with a time that its id determines, as copies in forks keep both."""
    time = f"2026-01-02T00:00:00.{sum(map(ord, name or 'x')) % 1000:03d}Z"
    return {"type": kind, "id": name, "parentId": parent, "timestamp": time} | extra


def message(name: str, parent: str | None, role: str, content: object, **extra) -> dict:
    return entry("message", name, parent, message={"role": role, "content": content} | extra)


def user(name: str, parent: str | None, text: object = "q") -> dict:
    return message(name, parent, "user", text)


def call(name: str, tool: str = "bash", arguments: object = None, **extra) -> dict:
    made = {"type": "toolCall", "id": name, "name": tool, "arguments": arguments or {}}
    return made | extra


def assistant(
    name: str, parent: str | None, text: str = "", calls: tuple = (), stop: str | None = "stop"
) -> dict:
    blocks = ([{"type": "text", "text": text}] if text else []) + list(calls)
    extra = {} if stop is None else {"stopReason": stop}
    return message(name, parent, "assistant", blocks, **extra)


def result(name: str, parent: str | None, of: str, text: str = "ok", error: bool = False) -> dict:
    blocks = [{"type": "text", "text": text}]
    extra = {"toolCallId": of, "toolName": "bash", "isError": error}
    return message(name, parent, "toolResult", blocks, **extra)


def compaction(name: str, parent: str | None, summary: str, **extra) -> dict:
    return entry("compaction", name, parent, summary=summary, tokensBefore=9, **extra)


def linear(*entries: dict) -> list[dict]:
    """The same entries without ids and parents, as version 1 wrote them."""
    return [{k: v for k, v in e.items() if k not in ("id", "parentId")} for e in entries]


def to_bytes(lines: list) -> bytes:
    """Objects become JSON lines; bytes stand as they are, line end added."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def read(folder: Path, files: dict[str, list | bytes], leaves="active", salvage=False):
    """Write files, read them, check the sums; return (conversations, rejected, stats)."""
    write_files(folder / "raw", files)
    write_manifest(folder, folder / "raw", list(files))
    return read_raw(folder, folder / "raw", leaves, salvage)


def write_files(folder: Path, files: dict[str, list | bytes]) -> None:
    for name, lines in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines if isinstance(lines, bytes) else to_bytes(lines))


def write_manifest(folder: Path, raw: Path, names: list[str]) -> None:
    sizes = {name: path.stat().st_size if (path := raw / name).is_file() else 0 for name in names}
    files = [{"file": name, "bytes": size} for name, size in sizes.items()]
    jsonl.write_json(folder / "manifest.json", {"files": files, "skipped": []})


def read_raw(folder: Path, raw: Path, leaves="active", salvage=False):
    outputs = [folder / name for name in ("conversations.jsonl", "rejected.jsonl", "stats.json")]
    try:
        read_sessions(raw, folder / "manifest.json", *outputs, leaves=leaves, salvage=salvage)
    except ValueError as error:
        if "no turn to train on" not in str(error):
            raise
    conversations = list(jsonl.read_jsonl(outputs[0]))
    rejected = list(jsonl.read_jsonl(outputs[1]))
    stats = jsonl.read_json(outputs[2])
    parts = stats["lines_used"] + stats["lines_rejected"] + stats["lines_outside"]
    assert parts == stats["lines_read"]
    assert sum(record["lines"] for record in rejected) == stats["lines_rejected"]
    supervised = [
        turn["key"] for c in conversations for turn in c["turns"] if turn.get("supervised")
    ]
    assert len(set(supervised)) == len(supervised) == stats["supervised_turns"]
    return conversations, rejected, stats


def shape(conversation: dict) -> list[str]:
    """Turns in short: "role text", a star on what is supervised, +tool for each call."""
    return [
        turn["role"][0]
        + ("*" if turn.get("supervised") else "")
        + f" {turn['text']}"
        + "".join(f" +{made['name']}" for made in turn.get("calls", ()))
        for turn in conversation["turns"]
    ]


def reasons(rejected: list[dict]) -> list[str]:
    return [record["reason"] for record in rejected]
