"""One session as a file: its scratch folder, its header, what it shares with a forked parent."""

import hashlib
import json
import shutil
from pathlib import Path

from agent_tools import HOME
from entries import Recording, append_entry, iso_time, read_time
from play import Play, Step
from recorder import perform


def record(play: Play, plays: dict[str, Play], scratch: Path) -> tuple[str, str]:
    """Play a session, and before it what it shares with the session it was forked from.

    Returns (file name, text of the file). Raises ValueError naming session and step for a script
    that can't be played.
    """
    origin = play
    shared: list[Step] = []
    if "fork" in play.header:
        parent, mark = play.header["fork"].split()
        origin = plays[parent]
        shared = origin.steps[: origin.steps.index(Step("mark", mark, ""))]
    folder = scratch / play.project
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in play.files:
        _place(folder, file)
    version = int(play.header.get("version", 3))
    session = Recording(origin.name, version, folder, read_time(origin.header["time"]))
    if "model" in origin.header:
        session.model = origin.header["model"]
    if version > 1 and "model" in origin.header:
        _model_changed(session, origin.header)
    perform(session, shared)
    if shared:
        session.name, session.clock = play.name, read_time(play.header["time"])
    perform(session, play.steps)
    lines = [_header(play, plays, session), *session.entries]
    text = "".join(
        json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines
    )
    return file_name(play), text


def file_name(play: Play) -> str:
    """pi's file names: the header's time with "-" for ":" and ".", then the session id."""
    stamp = iso_time(read_time(play.header["time"])).replace(":", "-").replace(".", "-")
    return f"{stamp}_{_session_id(play)}.jsonl"


def _header(play: Play, plays: dict[str, Play], session: Recording) -> dict:
    head = {
        "type": "session",
        "version": session.version,
        "id": _session_id(play),
        "timestamp": iso_time(read_time(play.header["time"])),
        "cwd": f"{HOME}/{play.project}",
    }
    if session.version == 1:
        del head["version"]
        provider, model = play.header.get("model", "scripted/scripted-small").split("/")
        head |= {"provider": provider, "modelId": model, "thinkingLevel": "off"}
    if "fork" in play.header:
        parent = plays[play.header["fork"].split()[0]]
        where = f"{HOME}/.pi/agent/sessions/--home-dev-{play.project}--"
        head["parentSession"] = f"{where}/{file_name(parent)}"
    return head


def _model_changed(session: Recording, header: dict[str, str]) -> None:
    provider, model = header["model"].split("/")
    append_entry(session, {"type": "model_change", "provider": provider, "modelId": model})
    append_entry(
        session,
        {"type": "thinking_level_change", "thinkingLevel": header.get("thinking", "off")},
    )


def _place(folder: Path, file: Step) -> None:
    """A project's file; "empty" and "latin-1" may follow its path."""
    path, _, how = file.rest.rpartition(" ")
    if how not in ("empty", "latin-1"):
        path, how = file.rest, ""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "" if how == "empty" else file.body + "\n"
    target.write_bytes(text.encode("latin-1" if how == "latin-1" else "utf-8"))


def _session_id(play: Play) -> str:
    digits = hashlib.sha256(f"session/{play.name}".encode()).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:32]}"
