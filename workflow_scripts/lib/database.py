"""Every step of a study in one SQLite file, written whole or not at all."""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from workflow_scripts.lib.jsonl import read_jsonl
from workflow_scripts.lib.rows import ROW_FIELDS

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
)
INTEGERS = {"step", "tokens", "supervised_tokens", "padded_tokens", "device_bytes"}


def write_database(
    path: str | Path, table: pl.DataFrame, steps_files: Sequence[str | Path]
) -> None:
    """Write tables `runs` (one row a run, as in the summary) and `steps` (one row a step).

    `steps_files` stand in the order of the table's rows; `steps.run` refers to `runs.run`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    connection = sqlite3.connect(temporary)
    try:
        with connection:
            connection.execute(_runs_schema(table))
            connection.execute(_steps_schema())
            marks = ", ".join("?" * (len(ROW_FIELDS) + 1))
            rows = [(number, *row) for number, row in enumerate(table.iter_rows(), start=1)]
            connection.executemany(f"INSERT INTO runs VALUES ({marks})", rows)
            marks = ", ".join("?" * (len(STEP_FIELDS) + 1))
            for number, file in enumerate(steps_files, start=1):
                connection.executemany(
                    f"INSERT INTO steps VALUES ({marks})",
                    ((number, *map(step.get, STEP_FIELDS)) for step in read_jsonl(file)),
                )
    finally:
        connection.close()
    os.replace(temporary, path)


def _runs_schema(table: pl.DataFrame) -> str:
    columns = ", ".join(f"{name} {_sql_type(table.schema[name])}" for name in ROW_FIELDS)
    return (
        f"CREATE TABLE runs (run INTEGER PRIMARY KEY, {columns}, "
        "UNIQUE (backend, model, context, variant))"
    )


def _steps_schema() -> str:
    kinds = [f"{name} {'INTEGER' if name in INTEGERS else 'REAL'}" for name in STEP_FIELDS]
    return (
        f"CREATE TABLE steps (run INTEGER NOT NULL REFERENCES runs (run), {', '.join(kinds)}, "
        "PRIMARY KEY (run, step)) WITHOUT ROWID"
    )


def _sql_type(dtype: pl.DataType) -> str:
    if dtype.is_integer() or dtype == pl.Boolean:
        return "INTEGER"
    return "REAL" if dtype.is_float() else "TEXT"
