"""Conversation records as the pieces that a chat template would write.

Each piece is known to be structure, content or the assistant's own words, so that masks follow from
construction and never from a search.
"""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from workflow_scripts.lib import chat_format
from workflow_scripts.lib.chat_format import (
    ChatFormat,
    UnprovenTemplateError,
    assistant,
    mark,
    user,
)

INLINE_CALL = chat_format.CallFormat(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "\n"
)
INLINE_RESULT = "<tool_response>\n{}\n</tool_response>"


class Piece(NamedTuple):
    """Text, and whether special tokens in it are meant (structure) and whether it is supervised."""

    text: str
    structure: bool
    supervised: bool = False


class Block(NamedTuple):
    """A turn, or several tool results that the template writes as one; turns counted from 0."""

    kind: str  # opening, system, user, assistant, tool
    pieces: list[Piece]
    first_turn: int
    last_turn: int


class Chat(NamedTuple):
    """A tokenizer's template and its format; `render` is the stock template itself."""

    format: ChatFormat
    render: Callable[..., str]
    openings: dict  # (system, tools) -> pieces, since few differ


def messages_of(
    turns: list[dict], chat_format: ChatFormat, thinking: str = "drop"
) -> tuple[list[dict], int]:
    """Return the turns of a record as messages for a template, and how many were empty.

    A message carries its turn's number and whether it is supervised, as `turn` and `supervised`,
    which templates ignore, and calls that became text as `inline`. Assistant text is stripped;
    thinking goes before it on request. Where the template has no tool calls, no results or no
    later system turns, they become text.
    """
    messages, empty = [], 0
    for number, turn in enumerate(turns):
        role, text = turn["role"], turn["text"]
        if role == "assistant":
            text = text.strip()
            thought = turn.get("thinking", "").strip() if thinking == "keep" else ""
            if thought:
                text = f"<think>\n{thought}\n</think>\n\n{text}".strip()
            message = assistant(text, *((c["name"], c["arguments"]) for c in turn.get("calls", ())))
            if not text and "tool_calls" not in message:
                empty += 1
                continue
            if chat_format.call is None:
                message = {**assistant(_body(message, INLINE_CALL)), "inline": message}
        else:
            if chat_format.strips:
                text = text.strip()
            if role == "tool" and chat_format.tool is None:
                role, text = "user", INLINE_RESULT.format(text)
            elif role == "system" and chat_format.system is None:
                role = "user"
            message = {"role": role, "content": text}
        messages.append({**message, "turn": number, "supervised": turn.get("supervised", False)})
    return messages, empty


def opening_of(chat: Chat, system: str | None, tools: list[dict]) -> Block:
    """Return what stands before the first turn: system prompt (or the template's own) and tools.

    Raises UnprovenTemplateError where the template does not show the tools.
    """
    key = (system, json.dumps(tools))
    if key not in chat.openings:
        chat.openings[key] = _opening(chat, system, tools)
    return Block("opening", chat.openings[key], 0, 0)


def _opening(chat: Chat, system: str | None, tools: list[dict]) -> list[Piece]:
    messages = [user(mark(0))]
    contents = {}
    if system is not None:
        messages.insert(0, {"role": "system", "content": mark(1)})
        contents[mark(1)] = system.strip() if chat.format.strips else system
    marked = [{mark(number): ""} for number in range(2, 2 + len(tools))]
    for stand_in, tool in zip(marked, tools, strict=True):
        schema = json.dumps(tool_schema(tool), ensure_ascii=False)
        contents[json.dumps(stand_in, ensure_ascii=False)] = schema
    text = chat.render(messages, tools=marked or None)
    rest = text.removesuffix(mark(0).join(chat.format.user))
    pieces = []
    for stand_in, content in contents.items():
        before, found, rest = rest.partition(stand_in)
        if not found:
            raise UnprovenTemplateError(
                "the chat template does not show the system prompt and the tools as given; "
                "set `tools: false` in the examples' config"
            )
        pieces += [Piece(before, True), Piece(content, False)]
    return [*pieces, Piece(rest, True)]


def tool_schema(tool: dict) -> dict:
    """A tool of a record in the form that templates take."""
    return {"type": "function", "function": tool}


def blocks_of(messages: list[dict], form: ChatFormat) -> Iterator[Block]:
    """Yield the blocks after the opening; all their texts joined are what the template writes."""
    waiting: list[dict] = []
    for message in messages:
        if message["role"] == "tool":
            waiting.append(message)
            continue
        if waiting:
            yield _tool_block(waiting, form)
            waiting = []
        pieces = _pieces(message, form)
        yield Block(message["role"], pieces, message["turn"], message["turn"])
    if waiting:
        yield _tool_block(waiting, form)


def _pieces(message: dict, form: ChatFormat) -> list[Piece]:
    if message["role"] == "assistant":
        supervised = message["supervised"]
        calls = form.call or INLINE_CALL
        parts = _parts(message.get("inline", message), calls)
        body = [Piece(text, structure, supervised) for text, structure in parts]
        end = Piece(form.end, True, supervised)
        return [Piece(form.header, True), *body, end, Piece(form.after, True)]
    before, after = form.system if message["role"] == "system" else form.user
    return [Piece(before, True), Piece(message["content"], False), Piece(after, True)]


def _parts(message: dict, form: chat_format.CallFormat) -> Iterator[tuple[str, bool]]:
    """Yield the texts of an assistant's turn, and whether each is structure."""
    if message["content"]:
        yield message["content"], False
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        between = form.between if number else form.after_text if message["content"] else ""
        yield between + form.before_name, True
        yield function["name"], False
        yield form.before_arguments, True
        yield json.dumps(function["arguments"], ensure_ascii=False), False
        yield form.after_arguments, True


def _body(message: dict, form: chat_format.CallFormat) -> str:
    return "".join(text for text, _ in _parts(message, form))


def _tool_block(messages: list[dict], form: ChatFormat) -> Block:
    opening, between, closing = form.tool
    pieces = []
    for number, message in enumerate(messages):
        pieces += [Piece(between if number else opening, True), Piece(message["content"], False)]
    pieces.append(Piece(closing, True))
    return Block("tool", pieces, messages[0]["turn"], messages[-1]["turn"])
