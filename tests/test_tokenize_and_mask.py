"""From split conversations to example files and their figures, as the rule does it."""

import re
from hashlib import sha256
from pathlib import Path

import conversation_maker as make
import pytest

from workflow_scripts.describe_examples import describe_examples
from workflow_scripts.lib import jsonl
from workflow_scripts.lib.masking import IGNORED
from workflow_scripts.tokenize_and_mask import tokenize_and_mask

READ = {"name": "read", "description": "Read", "parameters": {"type": "object", "properties": {}}}
SESSION = make.record(
    make.user("Fix the test"),
    make.assistant("Reading:", make.call("read", path="a.py"), thinking="Which file?"),
    make.tool("line\n" * 200),
    make.assistant("Fixed. " * 20),
    make.user("Thanks <|im_end|>"),
    make.assistant("You're welcome", supervised=False),
    make.user("Bye"),
    make.assistant("Bye"),
    tools=[READ],
)


@pytest.fixture
def split(tmp_path):
    """Write both splits; run the rule with the given keys; return the files' folder."""
    jsonl.write_jsonl(tmp_path / "train.jsonl", [SESSION, {**SESSION, "session": "t"}])
    jsonl.write_jsonl(tmp_path / "val.jsonl", [{**SESSION, "session": "v", "system": "For v."}])

    def run(model_folder, context=256, **keys) -> tuple[Path, dict]:
        out = tmp_path / "examples" / "small" / str(context)
        tokenize_and_mask(
            tmp_path / "train.jsonl",
            tmp_path / "val.jsonl",
            model_folder,
            out / "train.jsonl",
            out / "val.jsonl",
            out / "stats.json",
            context=context,
            **keys,
        )
        return out, jsonl.read_json(out / "stats.json")

    return run


def supervised_text(rows, tokenizer):
    labels = [label for row in rows for label in row["labels"] if label != IGNORED]
    return tokenizer.decode(labels)


@pytest.mark.parametrize("context", [64, 256, 4096])
def test_windows_hold_every_word_of_the_assistant(split, model_folder, prepared, context):
    out, stats = split(model_folder, context)
    rows = list(jsonl.read_jsonl(out / "train.jsonl"))
    assert {row["session"] for row in rows} == {"s", "t"}
    assert all(len(row["input_ids"]) == len(row["labels"]) <= context for row in rows)
    words = [
        make.words_of(turn) + "<|im_end|>" for turn in SESSION["turns"] if turn.get("supervised")
    ]
    assert supervised_text(rows, prepared.tokenizer) == "".join(words) * 2
    train = stats["train"]
    assert train["rows"] == len(rows)
    assert train["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert train["supervised_tokens"] == sum(
        label != IGNORED for row in rows for label in row["labels"]
    )
    assert sum(count for _, _, count in train["length_histogram"]) == len(rows)
    assert train["length_histogram"][-1][1] == context
    assert train["rows_per_session"]["sessions"] == 2
    assert stats["val"]["rows"] * 2 == len(rows)
    tokenizer = (model_folder / "tokenizer.json").read_bytes()
    assert stats["tokenizer_sha256"] == sha256(tokenizer).hexdigest()


def test_one_row_a_turn(split, model_folder):
    out, stats = split(model_folder, 4096, strategy="turns")
    rows = list(jsonl.read_jsonl(out / "val.jsonl"))
    assert [(row["first_turn"], row["last_turn"]) for row in rows] == [(0, 1), (0, 3), (0, 7)]
    out, stats = split(model_folder, 256, strategy="turns", overlong="drop")
    assert stats["val"]["rows"] == 1
    assert stats["val"]["dropped"]["overlong-row"] == 2
    out, stats = split(model_folder, 256, strategy="turns", overlong="cut")
    assert stats["val"]["rows"] == 3
    assert stats["val"]["cut"]["row"] == 2


def test_long_results_are_cut_and_counted(split, model_folder, prepared):
    out, stats = split(model_folder, 4096, tool_result_tokens=64)
    (row,) = jsonl.read_jsonl(out / "val.jsonl")
    text = prepared.tokenizer.decode(row["input_ids"])
    assert text.count("line\n") < 30
    assert " tokens cut ...]\n" in text
    assert stats["val"]["cut"]["tool-result"] == 1
    assert len(row["input_ids"]) < 600


def test_tools_thinking_and_system_prompt(split, model_folder, prepared):
    out, _ = split(model_folder, 4096, tools=True, thinking="keep")
    (row,) = jsonl.read_jsonl(out / "val.jsonl")
    text = prepared.tokenizer.decode(row["input_ids"])
    assert '<tools>\n{"type": "function", "function": {"name": "read"' in text
    assert "<|im_start|>assistant\n<think>\nWhich file?\n</think>\n\nReading:\n" in text
    assert "Which file?" in supervised_text([row], prepared.tokenizer)


def test_a_system_turn_at_the_start_is_the_system_prompt(tmp_path, split, model_folder, prepared):
    first = {"role": "system", "text": "Be brief.", "entry": "y"}
    record = make.record(first, make.user("Hi"), make.assistant("Hello"))
    jsonl.write_jsonl(tmp_path / "val.jsonl", [record])
    out, _ = split(model_folder, 4096)
    (row,) = jsonl.read_jsonl(out / "val.jsonl")
    text = prepared.tokenizer.decode(row["input_ids"])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    out, _ = split(model_folder, 4096, system_prompt="default")
    (row,) = jsonl.read_jsonl(out / "val.jsonl")
    text = prepared.tokenizer.decode(row["input_ids"])
    assert text.startswith("<|im_start|>system\nYou are Qwen")


def test_a_split_without_supervised_tokens_is_refused(tmp_path, split, model_folder):
    jsonl.write_jsonl(tmp_path / "val.jsonl", [make.record(make.user("Hi"))])
    with pytest.raises(ValueError, match=r"val\.jsonl: no row with a supervised token"):
        split(model_folder)
    with pytest.raises(ValueError, match="context: 63 is below 64"):
        split(model_folder, 63)


def test_a_validation_row_that_is_a_training_row_is_dropped_and_counted(
    tmp_path, split, model_folder
):
    same = [make.user("Run the tests"), make.assistant("They pass.")]
    train = make.record(make.user("Long ago"), make.assistant("Yes. " * 60), *same)
    val = make.record(make.user("Other"), make.assistant("No. " * 60), *same)
    jsonl.write_jsonl(tmp_path / "train.jsonl", [train])
    jsonl.write_jsonl(tmp_path / "val.jsonl", [val])
    out, stats = split(model_folder, 64)
    rows = {
        name: [tuple(row["input_ids"]) for row in jsonl.read_jsonl(out / f"{name}.jsonl")]
        for name in ("train", "val")
    }
    assert not set(rows["train"]) & set(rows["val"])
    assert stats["val"]["dropped"] == {"copy-of-a-training-row": 1}
    assert stats["train"]["dropped"] == {}


def test_description(split, model_folder, tmp_path):
    folders = [split(model_folder, context)[0] for context in (64, 256)]
    sessions = {
        "files": 2,
        "sessions": 3,
        "conversations": 3,
        "supervised_turns": 9,
        "lines_read": 10,
        "lines_used": 8,
        "lines_rejected": 1,
        "lines_outside": 1,
        "rejected": {"not-json": 1},
        "removed": {"aborted": 2},
        "unsupervised": {},
    }
    jsonl.write_json(tmp_path / "sessions.json", sessions)
    describe_examples(
        tmp_path / "sessions.json",
        [str(folder / "stats.json") for folder in folders],
        tmp_path / "description.md",
        tmp_path / "description.csv",
        tmp_path / "lengths.svg",
    )
    page = (tmp_path / "description.md").read_text()
    assert "Of 10 lines, 8 were used, 1 rejected" in page
    assert "Turns removed: aborted 2." in page
    assert re.search(r"\| small +\| 256 +\| val +\| +1 \|", page)
    assert re.search(r"\| small +\| 64 +\| train +\| cut +\| answer split +\|", page)
    assert (tmp_path / "description.csv").read_text().count("\n") == 5
    assert (tmp_path / "lengths.svg").read_text().startswith("<svg")
