"""Carries out the steps of a session one after the other and writes down the entries of each."""

import base64
import json

from agent_tools import ToolError, carry_out, shell
from entries import Recording, append_entry, call_id, iso_time, milliseconds, usage, wait
from play import Step

EDITS_SINCE = "2026-03"  # from here on `edit` takes a list of edits
CALLS = {"read", "bash", "edit", "write", "grep", "find", "ls"}


def perform(session: Recording, steps: list[Step]) -> None:
    """Group the steps into messages; an assistant message is thoughts, text and calls."""
    i = 0
    while i < len(steps):
        step = steps[i]
        if step.word in {"agent", "think"} | CALLS:
            end = i + 1
            if step.word == "think" and end < len(steps) and steps[end].word == "agent":
                end += 1
            while end < len(steps) and steps[end].word in CALLS:
                end += 1
            _assistant(session, steps[i:end])
            i = end
        elif step.word in OTHER_STEPS:
            OTHER_STEPS[step.word](session, step)
            i += 1
        else:
            raise ValueError(f"session {session.name}: unknown step {step.word!r}")


def _assistant(session: Recording, steps: list[Step]) -> None:
    content, calls = [], []
    ending = ""
    for step in steps:
        if step.word == "think":
            content.append({"type": "thinking", "thinking": step.body})
        elif step.word == "agent":
            ending = step.rest
            if step.body:
                content.append({"type": "text", "text": step.body})
        else:
            call = {"type": "toolCall", "id": call_id(session), "name": step.word}
            calls.append(call | {"arguments": _arguments(session, step)})
    said_at = session.clock
    size = len(json.dumps(content + calls)) // 4 + 1
    wait(session, 1500 + 12 * size, 2500)
    stop = ending.split(" ")[0] or ("toolUse" if calls else "stop")
    if stop == "aborted" and calls:
        calls[-1]["partialJson"] = json.dumps(calls[-1]["arguments"])[:-2]
    provider, model = session.model.split("/")
    message = {
        "role": "assistant",
        "content": content + calls,
        "api": "openai-completions",
        "provider": provider,
        "model": model,
        "usage": usage(session, 0 if stop == "error" else size),
        "stopReason": stop,
        "timestamp": milliseconds(said_at),
    }
    if stop in ("aborted", "error"):
        message["errorMessage"] = ending.partition(" ")[2] or "Request was aborted"
    append_entry(session, {"type": "message", "message": message})
    if stop == "toolUse":
        for call in calls:
            _result(session, call)


def _arguments(session: Recording, step: Step) -> dict:
    if step.word == "bash":
        return {"command": step.body}
    if step.word in ("grep", "find", "ls"):
        return json.loads(step.rest or "{}")
    path, *numbers = step.rest.split(" ")
    if step.word == "read":
        return {"path": path} | dict(zip(("offset", "limit"), map(int, numbers), strict=False))
    if step.word == "write":
        return {"path": path, "content": step.body + "\n"}
    pairs = [part.split("\n-->", 1) for part in step.body.split("\n+++\n")]
    edits = [{"oldText": old, "newText": new.removeprefix("\n")} for old, new in pairs]
    if iso_time(session.clock) >= EDITS_SINCE:
        return {"path": path, "edits": edits}
    return {"path": path} | edits[0]


def _result(session: Recording, call: dict) -> None:
    details, failed = None, False
    try:
        content, details = carry_out(call["name"], session.folder, call["arguments"])
    except ToolError as error:
        content, details, failed = [{"type": "text", "text": str(error)}], {}, True
    wait(session, 4, 300)
    message = {
        "role": "toolResult",
        "toolCallId": call["id"],
        "toolName": call["name"],
        "content": content,
    }
    if details is not None:
        message["details"] = details
    message |= {"isError": failed, "timestamp": milliseconds(session.clock)}
    session.context_tokens += sum(len(b.get("text", "image" * 50)) for b in content) // 4
    append_entry(session, {"type": "message", "message": message})


def _user(session: Recording, step: Step) -> None:
    wait(session, 9000 + 60 * len(step.body), 90_000)
    content = [{"type": "text", "text": step.body}]
    if step.rest:
        data = base64.b64encode((session.folder / step.rest).read_bytes()).decode()
        content.append({"type": "image", "data": data, "mimeType": "image/png"})
    session.context_tokens += len(step.body) // 4
    message = {"role": "user", "content": content, "timestamp": milliseconds(session.clock)}
    append_entry(session, {"type": "message", "message": message})


def _bang(session: Recording, step: Step) -> None:
    """The user's own `!command`; "hidden" (`!!`) keeps it from the model."""
    wait(session, 4000, 20_000)
    output, code = shell(session.folder, step.body)
    message = {
        "role": "bashExecution",
        "command": step.body,
        "output": output,
        "exitCode": code,
        "cancelled": False,
        "truncated": False,
        "timestamp": milliseconds(session.clock),
    }
    if step.rest == "hidden":
        message["excludeFromContext"] = True
    append_entry(session, {"type": "message", "message": message})


def _model(session: Recording, step: Step) -> None:
    session.model = step.rest
    provider, model = step.rest.split("/")
    append_entry(session, {"type": "model_change", "provider": provider, "modelId": model})


def _thinking(session: Recording, step: Step) -> None:
    append_entry(session, {"type": "thinking_level_change", "thinkingLevel": step.rest})


def _compact(session: Recording, step: Step) -> None:
    tip, index = session.marks[step.rest]
    kept = {"firstKeptEntryIndex": index} if session.version == 1 else {"firstKeptEntryId": tip}
    tokens = session.context_tokens
    wait(session, 6000, 4000)
    session.context_tokens = 900 + len(step.body) // 4
    append_entry(
        session, {"type": "compaction", "summary": step.body, **kept, "tokensBefore": tokens}
    )


def _mark(session: Recording, step: Step) -> None:
    session.marks[step.rest] = (session.tip, len(session.entries))


def _back(session: Recording, step: Step) -> None:
    session.tip = session.marks[step.rest][0]


def _extension(session: Recording, step: Step) -> None:
    if session.version == 2:
        message = {"role": "hookMessage", "customType": step.rest, "content": step.body}
        message |= {"display": True, "timestamp": milliseconds(session.clock)}
        append_entry(session, {"type": "message", "message": message})
    else:
        said = {"customType": step.rest, "content": step.body, "display": True}
        append_entry(session, {"type": "custom_message", **said})


OTHER_STEPS = {
    "user": _user,
    "bang": _bang,
    "model": _model,
    "compact": _compact,
    "mark": _mark,
    "back": _back,
    "extension": _extension,
    "thinking": _thinking,
    "label": lambda s, t: append_entry(s, {"type": "label", "targetId": s.tip, "label": t.rest}),
    "name": lambda s, t: append_entry(s, {"type": "session_info", "name": t.rest}),
    "branch_summary": lambda s, t: append_entry(
        s, {"type": "branch_summary", "fromId": s.tip or "root", "summary": t.body}
    ),
}
