"""A tokenizer's chat template taken apart: which text stands around each kind of turn.

Found by rendering short conversations whose contents are marks and looking at what lies between the
marks. Works for templates that write turn after turn; `chat.prove` then shows that it was right.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

Render = Callable[..., str]  # render(messages, tools=None, add_generation_prompt=False)


class CallFormat(NamedTuple):
    """Text around a tool call's name and arguments, between two calls, and after a text."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    after_text: str


class ChatFormat(NamedTuple):
    """Text around each kind of turn; None where the template has no such turn of its own."""

    header: str  # opens an assistant turn; not the assistant's own words
    end: str  # the token that closes an assistant turn; the assistant's own
    after: str  # what follows that token
    user: tuple[str, str]
    system: tuple[str, str] | None  # a system turn in mid-conversation
    tool: tuple[str, str, str] | None  # before the first result, between two, after the last
    call: CallFormat | None
    strips: bool  # whether the template strips what people and tools say


class UnprovenTemplateError(ValueError):
    """The chat template's assistant turns can't be told from the rest with certainty."""


def mark(number: int) -> str:
    """A text that no template has: a number between private-use characters."""
    return f"\ue000{number}\ue001"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: tuple[str, dict]) -> dict:
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [call_message(*call) for call in calls]
    return message


def call_message(name: str, arguments: dict) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def learn(render: Render, added_tokens: set[str]) -> ChatFormat:
    """Return the format of a chat template.

    `added_tokens` are the texts that the tokenizer turns into single ids. Raises
    UnprovenTemplateError saying which turn could not be delimited.
    """
    start = [user(mark(0))]
    before = render(start)
    header = _rest(render(start, add_generation_prompt=True), before, "the generation prompt")
    if not header.strip():
        raise UnprovenTemplateError("the template has no generation prompt: nothing opens a turn")
    answer = _rest(render([*start, assistant(mark(1))]), before, "an assistant turn")
    own_header, closing = _around(answer, mark(1), "an assistant turn")
    if own_header != header:
        raise UnprovenTemplateError(
            f"an assistant turn opens with {own_header!r}, the generation prompt is {header!r}"
        )
    end = max((each for each in added_tokens if closing.startswith(each)), key=len, default="")
    if not end:
        raise UnprovenTemplateError(
            f"an assistant turn closes with {closing!r}, which starts with no token of its own"
        )
    start.append(assistant(mark(1)))
    around_user = _block(render, start, user(mark(2)), "a user turn")
    if not before.endswith(mark(0).join(around_user)):
        raise UnprovenTemplateError("the first user turn is written in another way than later ones")
    return ChatFormat(
        header=header,
        end=end,
        after=closing.removeprefix(end),
        user=around_user,
        system=_optional_block(render, start, {"role": "system", "content": mark(2)}),
        tool=_tool_format(render, start),
        call=_call_format(render, start[:1], header, closing),
        strips=f"  {mark(0)}  " not in render([user(f"  {mark(0)}  ")]),
    )


def _rest(text: str, start: str, what: str) -> str:
    if not text.startswith(start):
        raise UnprovenTemplateError(f"{what} changes the text of the turns before it")
    return text[len(start) :]


def _around(text: str, content: str, what: str) -> tuple[str, str]:
    if text.count(content) != 1:
        raise UnprovenTemplateError(f"{what} shows its text {text.count(content)} times, not once")
    before, _, after = text.partition(content)
    return before, after


def _block(render: Render, start: list[dict], message: dict, what: str) -> tuple[str, str]:
    text = _rest(render([*start, message]), render(start), what)
    return _around(text, message["content"], what)


def _optional_block(render: Render, start: list[dict], message: dict) -> tuple[str, str] | None:
    from jinja2 import TemplateError

    try:
        return _block(render, start, message, f"a {message['role']} turn")
    except (UnprovenTemplateError, TemplateError):
        return None


def _tool_format(render: Render, start: list[dict]) -> tuple[str, str, str] | None:
    first, second = ({"role": "tool", "content": mark(number)} for number in (2, 3))
    alone = _optional_block(render, start, first)
    if alone is None:
        return None
    text = _rest(render([*start, first, second]), render(start), "a tool result")
    opening, rest = _around(text, mark(2), "a tool result")
    between, closing = _around(rest, mark(3), "a second tool result")
    return (opening, between, closing) if (opening, closing) == alone else None


def _call_format(render: Render, start: list[dict], header: str, closing: str) -> CallFormat | None:
    """None where the template refuses or ignores tool calls, or takes only one of them."""
    from jinja2 import TemplateError

    one, two = (mark(2), {mark(3): ""}), (mark(4), {mark(5): ""})
    try:
        texts = [
            render([*start, assistant(text, *calls)])
            for text, calls in (("", (one,)), ("", (one, two)), (mark(1), (one,)))
        ]
    except TemplateError:
        return None
    if mark(2) not in texts[0]:
        return None
    what = "a tool call"
    bodies = []
    for text in texts:
        body = _rest(_rest(text, render(start), what), header, what)
        if not body.endswith(closing):
            raise UnprovenTemplateError(
                f"{what} closes with {body[-40:]!r}, a text with {closing!r}"
            )
        bodies.append(body.removesuffix(closing))
    before_name, rest = _around(bodies[0], mark(2), what)
    before_arguments, after = _around(rest, json.dumps(one[1], ensure_ascii=False), what)
    parts = CallFormat(before_name, before_arguments, after, "", "")
    first, second = (call_text(parts, *call) for call in (one, two))
    if not (bodies[1].startswith(first) and bodies[1].endswith(second)):
        raise UnprovenTemplateError("two parallel tool calls are written in another way than one")
    if not (bodies[2].startswith(mark(1)) and bodies[2].endswith(first)):
        raise UnprovenTemplateError("a text and a tool call are not written one after the other")
    return parts._replace(
        between=bodies[1].removeprefix(first).removesuffix(second),
        after_text=bodies[2].removeprefix(mark(1)).removesuffix(first),
    )


def call_text(parts: CallFormat, name: str, arguments: dict) -> str:
    """A tool call as the template writes it, arguments as transformers' `tojson` does."""
    written = json.dumps(arguments, ensure_ascii=False)
    return f"{parts.before_name}{name}{parts.before_arguments}{written}{parts.after_arguments}"
