"""Chat templates taken apart: Qwen's, others of its kind, and those that must be refused."""

import shutil

import conversation_maker as make
import pytest
from transformers import AutoTokenizer

from workflow_scripts.lib.chat import blocks_of, messages_of, opening_of
from workflow_scripts.lib.template_proof import TOOLS, UnprovenTemplateError, load_chat

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{{- '<|begin|>' }}{% for message in messages %}
{%- if message.tool_calls and message.tool_calls|length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""
HIDES_OLD_ANSWERS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and not loop.last %}{{ '...' }}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NO_END = """{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def with_template(model_folder, folder, template, tokens=()):
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


def text_of(record, chat, tools=()):
    messages, _ = messages_of(record["turns"], chat.format)
    blocks = [
        opening_of(chat, record["system"], list(tools)),
        *blocks_of(messages, chat.format),
    ]
    return "".join(piece.text for block in blocks for piece in block.pieces)


def test_qwen_text(prepared):
    conversation = make.record(
        make.user("Hi"),
        make.assistant("On it:\n", make.call("read", path="é"), make.call("ls")),
        make.tool("one"),
        make.tool("two"),
        make.assistant("", make.call("ls")),
        make.tool(""),
        make.assistant(" Done. "),
    )
    assert text_of(conversation, prepared.chat) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOn it:\n"
        '<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n"
    )


def test_system_prompt_and_tools_as_given(prepared):
    text = text_of(make.record(make.user("Hi"), system="Be brief."), prepared.chat, TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '"description": "Read a file, é <& all"' in text
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


def test_thinking_is_dropped_or_comes_first(prepared):
    turns = [make.assistant("Yes", thinking=" Is it?\n")]
    dropped, _ = messages_of(turns, prepared.chat.format, "drop")
    kept, _ = messages_of(turns, prepared.chat.format, "keep")
    assert dropped[0]["content"] == "Yes"
    assert kept[0]["content"] == "<think>\nIs it?\n</think>\n\nYes"


def test_an_empty_turn_is_left_out_and_counted(prepared):
    turns = [make.user("Hi"), make.assistant(" \n"), make.assistant("", thinking="Hm")]
    messages, empty = messages_of(turns, prepared.chat.format)
    assert ([message["turn"] for message in messages], empty) == ([0], 2)


def test_a_template_without_tools_gets_calls_and_results_as_text(model_folder, tmp_path):
    chat, _ = load_chat(with_template(model_folder, tmp_path, SMOLLM2))
    turns = [make.user("Hi"), make.assistant("So:", make.call("ls")), make.tool("a.txt")]
    assert text_of(make.record(*turns), chat).endswith(
        '<|im_start|>assistant\nSo:\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\na.txt<|im_end|>\n"
    )


def test_a_template_that_strips_and_takes_one_call(model_folder, tmp_path):
    tokens = ["<|begin|>", "<|start|>", "<|end|>", "<|eot|>"]
    chat, _ = load_chat(with_template(model_folder, tmp_path, LLAMA3, tokens))
    assert (chat.format.header, chat.format.end, chat.format.after) == (
        "<|start|>assistant<|end|>\n\n",
        "<|eot|>",
        "",
    )
    assert chat.format.strips


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (HIDES_OLD_ANSWERS, "changes the text of the turns before it"),
        (NO_END, "starts with no token of its own"),
        (SMOLLM2.replace("message['content']", "''"), "shows its text 0 times, not once"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ strftime_now('%d %b %Y') }}" + SMOLLM2, "writes the current date"),
        (
            SMOLLM2.replace("message['content'] +", "message['content'].split('</think>')[-1] +"),
            "'markup in an answer'",
        ),
    ],
)
def test_templates_that_are_refused(model_folder, tmp_path, template, message):
    folder = with_template(model_folder, tmp_path, template)
    with pytest.raises(UnprovenTemplateError, match=message) as caught:
        load_chat(folder)
    assert str(folder) in str(caught.value)


def test_a_template_that_writes_special_cases_is_caught_by_the_proof(model_folder, tmp_path):
    template = SMOLLM2.replace(
        "message['content'] +", "message['content'] | replace('Stopped', 'Ended') +"
    )
    with pytest.raises(UnprovenTemplateError, match=r"'parallel calls'.*Ended.*Stopped"):
        load_chat(with_template(model_folder, tmp_path, template))


def test_tools_that_a_template_does_not_show_are_refused(model_folder, tmp_path):
    with pytest.raises(UnprovenTemplateError, match="`tools: false`"):
        load_chat(with_template(model_folder, tmp_path, SMOLLM2), tools=True)


def test_a_damaged_tokenizer_is_named(model_folder, tmp_path):
    folder = with_template(model_folder, tmp_path, SMOLLM2)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its tokenizer can't be read .*fetch or copy the model"):
        load_chat(folder)


def test_a_tokenizer_without_a_template(model_folder, tmp_path):
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UnprovenTemplateError, match="no chat template"):
        load_chat(tmp_path)
