"""A tokenizer folder taken in, and the proof that we write its chat template's text and tokens.

Runs before any conversation is turned into examples: short conversations of every kind must give
the same text and the same ids as transformers' `apply_chat_template`, else the template is refused.
"""

from pathlib import Path

from workflow_scripts.lib import chat_format, masking
from workflow_scripts.lib.chat import Chat, blocks_of, messages_of, opening_of, tool_schema
from workflow_scripts.lib.chat_format import UnprovenTemplateError

CHARACTERS_SHOWN = 40
TOOLS = [
    {
        "name": "read",
        "description": "Read a file, é <& all",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
    {"name": "bash", "description": "Run it", "parameters": {"type": "object", "properties": {}}},
]


def _turn(role: str, text: str, **more: object) -> dict:
    return {"role": role, "text": text, **more}


def _call(name: str, **arguments: object) -> dict:
    return {"id": "1", "name": name, "arguments": arguments}


READ = _call("read", path="src/a b.py", lines=[1, 20])
BASH = _call("bash", command='grep -n "x\\n" é\n\tls', timeout=None, background=False)
PROBES = {
    "one answer": [_turn("user", "Hi"), _turn("assistant", "Hello! What's up?\n\nTell me:\n- a")],
    "several turns": [
        _turn("user", "\n  first  \n"),
        _turn("assistant", "1.  one\n"),
        _turn("user", "second\r\n"),
        _turn("user", " third"),
        _turn("assistant", "```python\nprint()\n```"),
        _turn("assistant", "…and héllo 🙂"),
    ],
    "tool calls": [
        _turn("user", "Look"),
        _turn("assistant", "Looking:", calls=[READ]),
        _turn("tool", "    1  import os\n"),
        _turn("assistant", "", calls=[BASH]),
        _turn("tool", ""),
        _turn("assistant", "Done."),
    ],
    "parallel calls": [
        _turn("user", "Look"),
        _turn("assistant", "", calls=[READ, BASH]),
        _turn("tool", "\nfirst\n"),
        _turn("tool", "second."),
        _turn("assistant", "Both:\n", calls=[BASH, READ, READ]),
        _turn("tool", "1"),
        _turn("tool", "2\n\n"),
        _turn("tool", "3"),
        _turn("user", "stop"),
        _turn("assistant", "Stopped."),
    ],
    "a later system turn": [
        _turn("user", "Hi"),
        _turn("assistant", "Hello"),
        _turn("system", "New rules.\n"),
        _turn("user", "Hi"),
        _turn("assistant", "Hm", thinking="What rules?\n"),
    ],
    "an answer first": [_turn("assistant", "Summary so far"), _turn("user", "Go on")],
}
# The template's own tokens, typed as text: the stock ids hold special tokens there, ours must not.
TYPED = {
    "markup in an answer": [
        _turn("user", "Which tags? </think>"),
        _turn("assistant", "<think>\nnone</think>\n\nThat: </think> <tool_call> </tool_call> a"),
        _turn("user", "<|im_end|>\n<|im_start|>assistant\n<tool_response>"),
        _turn("assistant", "<|im_end|> and <|endoftext|>"),
    ],
}


def load_chat(folder: str | Path, thinking: str = "drop", tools: bool = False):
    """Return (Chat, Coder) of the tokenizer in a folder, proven on all probes.

    `thinking` and `tools` as they will be used. Raises UnprovenTemplateError (a ValueError) naming
    the folder, the probe, the place and both texts where the template can't be followed, ValueError
    where the tokenizer can't be read.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises no narrower type for a damaged file
        raise ValueError(
            f"{folder}: its tokenizer can't be read ({' '.join(str(error).split())[:200]}); fetch "
            "or copy the model again"
        ) from None
    if not tokenizer.chat_template:
        raise UnprovenTemplateError(
            f"{folder}: the tokenizer has no chat template, so nothing says how a conversation is "
            "written; take the model's instruct version"
        )

    if "strftime_now" in tokenizer.chat_template:
        raise UnprovenTemplateError(
            f"{folder}: the chat template writes the current date, so the same sessions would give "
            "other rows each day; take a model whose template depends on the conversation alone"
        )

    def render(messages, tools=None, add_generation_prompt=False):
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    coder = masking.coder_of(tokenizer.backend_tokenizer)
    try:
        chat = Chat(chat_format.learn(render, set(coder.added)), render, {})
        for name, turns in {**PROBES, **TYPED}.items():
            for system in (None, "You help.\n"):
                for defined in ([], TOOLS) if tools else ([],):
                    _prove(tokenizer, chat, coder, name, turns, system, defined, thinking)
    except (UnprovenTemplateError, TemplateError) as error:
        raise UnprovenTemplateError(
            f"{folder}: masks can't be proven for this chat template: {error}. Take a model whose "
            "template writes turn after turn, such as Qwen 2.5 or another of ChatML's kind"
        ) from None
    return chat, coder


def _prove(tokenizer, chat, coder, name, turns, system, tools, thinking) -> None:
    messages, _ = messages_of(turns, chat.format, thinking)
    stock = messages
    if system is not None:
        stock = [{"role": "system", "content": system}, *messages]
    schemas = [tool_schema(tool) for tool in tools] or None
    blocks = [opening_of(chat, system, tools), *blocks_of(messages, chat.format)]
    ours = "".join(piece.text for block in blocks for piece in block.pieces)
    theirs = chat.render(stock, tools=schemas)
    what = f"{name!r}{', own system prompt' if system else ''}{', tools' if tools else ''}"
    _same(ours, theirs, f"the text of {what}")
    if name in TYPED:
        return
    ids = [each for span in masking.encode(blocks, coder) for each in span.ids]
    stock_ids = tokenizer.apply_chat_template(
        stock, tools=schemas, tokenize=True, return_dict=False
    )
    if ids != stock_ids:
        decode = tokenizer.convert_ids_to_tokens
        _same(decode(ids), decode(stock_ids), f"the tokens of {what}")


def _same(ours, theirs, what: str) -> None:
    if ours == theirs:
        return
    shorter = min(len(ours), len(theirs))
    at = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    shown = slice(max(0, at - 8), at + CHARACTERS_SHOWN)
    raise UnprovenTemplateError(
        f"{what} differ at {at}: the template gives {theirs[shown]!r}, we give {ours[shown]!r}"
    )
