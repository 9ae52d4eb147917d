"""Every step of a study in one SQLite file, written whole or not at all."""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from workflow_scripts.lib.jsonl import read_json, read_jsonl

SCHEMA = Path(__file__).with_name("database.sql")
STEP_FIELDS = (
    "step",
    "loss",
    "token_accuracy",
    "learning_rate",
    "grad_norm",
    "seconds",
    "tokens",
    "supervised_tokens",
    "padded_tokens",
    "device_bytes",
    "new_shape",
    "flops",
)
MEMORY_FIELDS = ("seconds", "process_bytes", "available_bytes", "swap_used_bytes", "device_bytes")
CHOICES = (
    "tokenizer_sha256",
    "strategy",
    "overlong",
    "repeated_context",
    "thinking",
    "tools",
    "tool_result_tokens",
    "system_prompt",
)
LENGTHS = ("min", "p50", "p95", "max")


class Run(NamedTuple):
    """What one run leaves: its row, and the files of its steps and memory samples."""

    row: dict
    steps_file: str | Path
    memory_file: str | Path


def write_database(
    path: str | Path, runs: Sequence[Run], examples_files: Iterable[str | Path]
) -> None:
    """Write the tables of `database.sql`, which describes every column.

    `examples_files` are stats.json files at .../{tokenizer}/{context}/stats.json; a run refers to
    the one of its tokenizer and context. Raises ValueError naming a file that is damaged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with closing(sqlite3.connect(temporary)) as connection, connection:
            connection.executescript(SCHEMA.read_text("utf-8"))
            connection.execute("PRAGMA foreign_keys = ON")
            examples = _insert_examples(connection, examples_files)
            for number, run in enumerate(runs, start=1):
                _insert_run(connection, number, run, examples)
            connection.execute("ANALYZE")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _insert_examples(
    connection: sqlite3.Connection, files: Iterable[str | Path]
) -> dict[tuple[str, int], int]:
    numbers = {}
    for number, file in enumerate(files, start=1):
        stats = read_json(file)
        tokenizer, context = Path(file).parts[-3], int(Path(file).parts[-2])
        numbers[tokenizer, context] = number
        choices = [stats.get(field) for field in CHOICES]
        _insert(connection, "examples", [(number, tokenizer, context, *choices)])
        for split in ("train", "val"):
            found = stats[split]
            counts = [found[key] for key in ("conversations", "rows", "tokens")]
            lengths = [found["length_quantiles"].get(key) for key in LENGTHS]
            row = (number, split, *counts, found["supervised_tokens"], *lengths)
            _insert(connection, "splits", [row])
            left_out = [
                (number, split, what, reason, count)
                for what in ("dropped", "cut")
                for reason, count in found[what].items()
            ]
            _insert(connection, "left_out", left_out)
    return numbers


def _insert_run(
    connection: sqlite3.Connection, number: int, run: Run, examples: dict[tuple[str, int], int]
) -> None:
    row = run.row
    fields = {key: value for key, value in row.items() if key != "versions"}
    refers = examples.get((row["tokenizer"], row["context"]))
    names = ", ".join(("run", "examples", *fields))
    marks = ", ".join("?" * (2 + len(fields)))
    connection.execute(
        f"INSERT INTO runs ({names}) VALUES ({marks})", (number, refers, *fields.values())
    )
    _insert(
        connection,
        "steps",
        ((number, *map(step.get, STEP_FIELDS)) for step in read_jsonl(run.steps_file)),
    )
    _insert(
        connection,
        "memory_samples",
        ((number, *map(sample.get, MEMORY_FIELDS)) for sample in read_jsonl(run.memory_file)),
    )
    evaluations = [
        (
            number,
            moment,
            loss,
            row[f"val_token_accuracy{suffix}"],
            row["val_rows"],
            row["val_tokens"],
        )
        for moment, suffix in (("before", "_before"), ("after", ""))
        if (loss := row[f"val_loss{suffix}"]) is not None
    ]
    _insert(connection, "evaluations", evaluations)
    versions = sorted((row["versions"] or {}).items())
    _insert(connection, "versions", [(number, *each) for each in versions])


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[tuple]) -> None:
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    statement = f"INSERT INTO {table} VALUES ({', '.join('?' * len(first))})"
    connection.execute(statement, first)
    connection.executemany(statement, rows)
