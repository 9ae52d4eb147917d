"""TRL's own way from conversations to token rows: SFTTrainer's preparation of its data set.

`assistant_only_loss` with TRL's training template, through `datasets.map`, by TRL's own code. What
is timed is the preparation alone: the data set has been built and the tokenizer loaded before.
"""

import contextlib
import io
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from workflow_scripts.lib import jsonl
from workflow_scripts.lib.chat import messages_of
from workflow_scripts.lib.chat_format import ChatFormat

IGNORED = -100


class Prepared(NamedTuple):
    """Rows that TRL would train on, and its time."""

    rows: int
    tokens: int
    supervised_tokens: int
    seconds: float


class Route(NamedTuple):
    """TRL's trainer, built once on a model of no size, and the data set it is to prepare."""

    trainer: object
    dataset: object


def messages_in(record: dict, form: ChatFormat) -> list[dict]:
    """The record's messages as TRL takes them, opening with its system prompt where it has one."""
    messages, _ = messages_of(record["turns"], form)
    opening = [{"role": "system", "content": record["system"]}] if record["system"] else []
    return opening + messages


def bare(messages: list[dict]) -> list[dict]:
    """Messages without what only our own code reads."""
    keys = ("role", "content", "tool_calls")
    return [{key: message[key] for key in keys if key in message} for message in messages]


def whole_conversations(conversations: Path, form: ChatFormat) -> Iterator[dict]:
    """One row a conversation."""
    for record in jsonl.read_jsonl(conversations):
        messages = messages_in(record, form)
        if any(message["role"] == "assistant" for message in messages):
            yield {"messages": bare(messages)}


def same_rows(conversations: Path, examples: Path, form: ChatFormat) -> Iterator[dict]:
    """The rows of `strategy: turns`, as prompt and completion: that is, with our labels.

    TRL gets them already cut at the turns where ours were cut.
    """
    rows = jsonl.read_jsonl(examples)
    row = next(rows, None)
    for record in jsonl.read_jsonl(conversations):
        messages = messages_in(record, form)
        last = max((n for n, m in enumerate(messages) if m.get("supervised")), default=-1)
        at = -1
        while row is not None and at < last and row["session"] == record["session"]:
            at = next(n for n, m in enumerate(messages) if m.get("turn") == row["last_turn"])
            lead = [
                m for m in messages[:at] if m.get("turn", row["first_turn"]) >= row["first_turn"]
            ]
            yield {"prompt": bare(lead), "completion": bare(messages[at : at + 1])}
            row = next(rows, None)


def route(
    rows: Iterator[dict], tokenizer_folder: str, context: int, processes: int | None
) -> Route:
    """Build the trainer and the data set; none of this is timed."""
    import torch
    from datasets import Dataset, disable_caching, disable_progress_bars
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    disable_caching()
    logging.getLogger("trl").setLevel(logging.ERROR)
    dataset = Dataset.from_list(list(rows), on_mixed_types="use_json")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    prompted = "prompt" in dataset.column_names
    args = SFTConfig(
        output_dir=tempfile.gettempdir(),
        max_length=context,
        assistant_only_loss=True,
        completion_only_loss=prompted,
        dataset_num_proc=processes,
        use_cpu=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=dataset.select(range(1)), processing_class=tokenizer
    )
    return Route(trainer, dataset)


def prepare(found: Route) -> Prepared:
    trainer = found.trainer
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        rows = trainer._prepare_dataset(
            found.dataset, trainer.processing_class, trainer.args, False, None, "train"
        )
    seconds = time.perf_counter() - started
    tokens = supervised = 0
    for labels in rows["labels"]:
        tokens += len(labels)
        supervised += len(labels) - list(labels).count(IGNORED)
    return Prepared(len(rows), tokens, supervised, seconds)
