"""Entries -> turns: what the model was sent for one entry, by pi's own rules (core/messages.ts)."""

import json
import math
from typing import NamedTuple

from workflow_scripts.lib.lines import without_surrogates

IMAGE = "[image]"
COMPACTION = (
    "The conversation history before this point was compacted into the following summary:"
    "\n\n<summary>\n{}\n</summary>"
)
BRANCH = (
    "The following is a summary of a branch that this conversation came back from:"
    "\n\n<summary>\n{}</summary>"
)
# Never in context; they only link the chain.
BOOKKEEPING = (
    "model_change",
    "thinking_level_change",
    "label",
    "session_info",
    "custom",
    "active_tools_change",
    "leaf",
)
REMOVED_STOPS = ("error", "aborted", "deferred", "pending")
DEEPEST_VALUE = 100


class Piece(NamedTuple):
    """A turn and what is said about it.

    `why`: without a turn, why there is none; with an assistant turn, why it is not trained on ("":
    it is). `changed`: what the turn no longer shows as it was sent.
    """

    turn: dict | None
    why: str = ""
    changed: tuple[str, ...] = ()


def piece_of(data: dict, name: str) -> Piece:
    """Turn an entry, whose id is `name`, into a piece. Compactions give none: see `summary`."""
    kind = data.get("type")
    if kind == "message":
        message = data.get("message")
        if not isinstance(message, dict):
            return Piece(None, "no-message")
        return piece_of_message(message, name)
    if kind == "custom_message":
        return _user(data.get("content"), name, "custom")
    if kind == "branch_summary":
        return _summary(data, BRANCH, name, "branch_summary")
    if kind == "compaction" or kind in BOOKKEEPING:
        return Piece(None, "not-in-context")
    return Piece(None, "unknown-type")


def piece_of_message(message: dict, name: str) -> Piece:
    """Turn a message (of an entry, or of a compaction's retained tail) into a piece."""
    role = message.get("role")
    if role == "user":
        return _user(message.get("content"), name, "user")
    if role == "assistant":
        return _assistant(message, name)
    if role == "toolResult":
        return _tool_result(message, name)
    if role == "bashExecution":
        return _bash(message, name)
    if role in ("custom", "hookMessage"):
        return _user(message.get("content"), name, "custom")
    if role == "branchSummary":
        return _summary(message, BRANCH, name, "branch_summary")
    if role == "compactionSummary":
        return _summary(message, COMPACTION, name, "compaction")
    if role in ("system", "developer"):
        return Piece(None, "system")
    return Piece(None, "unknown-role")


def summary(data: dict, name: str) -> dict | None:
    """User turn that stands for what a compaction entry replaced."""
    return _summary(data, COMPACTION, name, "compaction").turn


def text_of(content: object) -> tuple[str, tuple[str, ...]]:
    """Join the text of a content value (string, blocks, nothing); an image gives a placeholder."""
    if isinstance(content, str):
        return content, ()
    texts, changed = [], []
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "image":
            texts.append(IMAGE)
            changed.append("image")
        elif isinstance(block, str):
            texts.append(block)
        else:
            changed.append("unknown-block")
    return "\n".join(texts), tuple(changed)


def is_plain(value: object, deepest: int = DEEPEST_VALUE) -> bool:
    """Whether a value can be written as JSON again: not too deep, no number out of range."""
    level = [value]
    for _ in range(deepest + 1):
        below: list = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                return False
        if not below:
            return True
        level = below
    return False


def _user(content: object, name: str, source: str) -> Piece:
    text, changed = text_of(content)
    if not text.strip():
        return Piece(None, "empty-user", changed)
    return Piece({"role": "user", "text": text, "entry": name, "source": source}, "", changed)


def _summary(data: dict, form: str, name: str, source: str) -> Piece:
    text = data.get("summary")
    # pi sends an empty compaction summary too, but no empty branch summary.
    if not isinstance(text, str) or not (text or source == "compaction"):
        return Piece(None, "empty-summary")
    return Piece({"role": "user", "text": form.format(text), "entry": name, "source": source})


def _bash(message: dict, name: str) -> Piece:
    if message.get("excludeFromContext") is True:
        return Piece(None, "excluded-bash")
    command, output = message.get("command"), message.get("output")
    text = f"Ran `{command if isinstance(command, str) else ''}`\n"
    text += f"```\n{output}\n```" if isinstance(output, str) and output else "(no output)"
    code = message.get("exitCode")
    if message.get("cancelled"):
        text += "\n\n(command cancelled)"
    elif isinstance(code, int | float) and code != 0:
        text += f"\n\nCommand exited with code {code}"
    full = message.get("fullOutputPath")
    if message.get("truncated") and isinstance(full, str) and full:
        text += f"\n\n[Output truncated. Full output: {full}]"
    return Piece({"role": "user", "text": text, "entry": name, "source": "bash"})


def _tool_result(message: dict, name: str) -> Piece:
    call = message.get("toolCallId")
    if not isinstance(call, str) or not call:
        return Piece(None, "result-without-call")
    text, changed = text_of(message.get("content"))
    tool = message.get("toolName")
    turn = {
        "role": "tool",
        "call": call,
        "name": tool if isinstance(tool, str) else "",
        "text": text,
        "error": message.get("isError") is True,
        "entry": name,
    }
    return Piece(turn, "", changed)


def _assistant(message: dict, name: str) -> Piece:
    """An assistant turn: removed when the request failed or nothing is visible in it.

    A call whose arguments are neither an object nor a JSON string of one is kept as context with
    empty arguments, since its result follows, but the turn is not trained on.
    """
    stop = message.get("stopReason")
    if isinstance(stop, str) and stop in REMOVED_STOPS:
        return Piece(None, stop)
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts, thoughts, calls, changed, problems = [], [], [], [], []
    for place, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            if block["text"].strip():
                texts.append(block["text"])
                if calls:
                    changed.append("text-after-call")
        elif kind == "thinking":
            thought = block.get("thinking")
            if isinstance(thought, str) and thought.strip() and not block.get("redacted"):
                thoughts.append(thought)
        elif kind == "toolCall":
            call, problem = _call(block, f"{name}:{place}")
            calls += [call] if call else []
            problems += [problem] if problem else []
        else:
            changed.append("unknown-block")
    if not texts and not calls:
        return Piece(None, "empty-assistant", tuple(changed))
    turn = {"role": "assistant", "text": "\n".join(texts).strip()}
    if thoughts:
        turn["thinking"] = "\n".join(thoughts)
    turn.update(calls=calls, entry=name)
    if stop == "length":
        why = "length"
    elif stop not in (None, "stop", "toolUse"):
        why = "unknown-stop"
    else:
        why = problems[0] if problems else ""
    return Piece(turn, why, tuple(changed))


def _call(block: dict, fallback_id: str) -> tuple[dict | None, str]:
    """Return the call and what is wrong with it."""
    tool, arguments = block.get("name"), block.get("arguments")
    if not isinstance(tool, str) or not tool.strip():
        return None, "nameless-call"
    if isinstance(arguments, str):
        try:
            arguments = without_surrogates(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = None
    call = block.get("id")
    call = call if isinstance(call, str) and call else fallback_id
    problem = "" if isinstance(arguments, dict) and is_plain(arguments) else "bad-arguments"
    return {"id": call, "name": tool, "arguments": {} if problem else arguments}, problem
