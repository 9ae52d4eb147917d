"""The rows of a study as one table, and the table as text for people."""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from workflow_scripts.lib.jsonl import read_json
from workflow_scripts.lib.rows import ROW_FIELDS
from workflow_scripts.lib.tables import markdown_table

MEGA = 1e6

# heading with its unit -> (field of the row, factor); without a factor the field is a count
SPEED = {
    "real tokens/s": ("tokens_per_s", 1),
    "supervised tokens/s": ("supervised_tokens_per_s", 1),
    "sequences/s": ("sequences_per_s", 1),
    "optimizer steps/s": ("optimizer_steps_per_s", 1),
    "median step (s)": ("step_seconds_p50", 1),
    "training (s)": ("train_seconds", 1),
    "whole run (s)": ("wall_seconds", 1),
}
MEMORY = {
    "process peak (MB)": ("peak_process_bytes", 1 / MEGA),
    "device peak (MB)": ("peak_device_bytes", 1 / MEGA),
}
LEARNING = {
    "steps": ("optimizer_steps", None),
    "loss before": ("val_loss_before", 1),
    "loss after": ("val_loss", 1),
    "accuracy before (%)": ("val_token_accuracy_before", 100),
    "accuracy after (%)": ("val_token_accuracy", 100),
}
MAIN = {
    "loss before": LEARNING["loss before"],
    "loss after": LEARNING["loss after"],
    "accuracy after (%)": LEARNING["accuracy after (%)"],
    "real tokens/s": SPEED["real tokens/s"],
    "supervised tokens/s": SPEED["supervised tokens/s"],
    "process peak (MB)": MEMORY["process peak (MB)"],
    "whole run (s)": SPEED["whole run (s)"],
}


def read_rows(row_files: Sequence[str | Path]) -> pl.DataFrame:
    """Read row.json files into a table with one column per field of a row, in the given order.

    Versions, a mapping, become JSON text. Raises ValueError naming a file that is not a row.
    """
    rows = []
    for path in row_files:
        row = read_json(path)
        if missing := [field for field in ROW_FIELDS if field not in row]:
            raise ValueError(f"{path}: fields missing from the row: {', '.join(missing)}")
        versions = json.dumps(row["versions"], sort_keys=True) if row["versions"] else None
        rows.append({field: row[field] for field in ROW_FIELDS} | {"versions": versions})
    return pl.DataFrame(rows, schema=list(ROW_FIELDS), infer_schema_length=None, strict=False)


def summary_text(
    study: str, table: pl.DataFrame, data: dict[str, str], missing: Sequence[str] = ()
) -> str:
    """The comparison as Markdown.

    `data` says by name what was read and used; `missing` names runs of the grid without a row.
    """
    done = table.filter(pl.col("status") == "ok")
    parts = [
        f"# Study {study}: {_count(table.height, 'run')}, {done.height} ok",
        markdown_table(named(table, MAIN)),
        *_caveats(table),
    ]
    if missing:
        listed = "\n".join(f"- {run}" for run in missing)
        parts.append(f"Still missing ({_count(len(missing), 'run')}):\n\n{listed}")
    if endings := _endings(table):
        parts.append("## What did not end well\n\n" + endings)
    parts += [
        "## Speed\n\nFrom one measured time per step. Left out: steps that saw a row length for "
        "the first time, evaluation, and saving. Padding counts in no rate.",
        markdown_table(named(done, SPEED)),
        "## Memory\n\n1 MB is 1,000,000 bytes. Device peak is what the engine itself counted; "
        "empty where it counts nothing.",
        markdown_table(named(done, MEMORY)),
        "## Learning\n\nLoss and accuracy over every supervised token of the validation rows, each "
        "row once, before and after training.",
        markdown_table(named(done, LEARNING)),
        "## Data and machine",
        "\n".join(f"- {name}: {value}" for name, value in data.items()),
        _machines(table),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def named(table: pl.DataFrame, columns: dict[str, tuple[str, float | None]]) -> pl.DataFrame:
    """Choose columns under headings that people read, each after the name of its run."""
    names = [
        pl.col("backend"),
        pl.col("model"),
        pl.col("context").cast(pl.String).alias("context (tokens)"),
        numbers_column(),
        pl.col("status"),
    ]
    if table["variant"].n_unique() > 1:
        names.insert(3, pl.col("variant"))
    figures = [
        _figure(field, factor).alias(heading) for heading, (field, factor) in columns.items()
    ]
    return table.select(*names, *figures)


def _figure(field: str, factor: float | None) -> pl.Expr:
    if factor is None:
        return pl.col(field).cast(pl.Int64, strict=False)
    return pl.col(field).cast(pl.Float64, strict=False) * factor


def numbers_column() -> pl.Expr:
    """How the frozen weights are held: "4-bit", or their number format."""
    bits = pl.concat_str(pl.col("bits").cast(pl.String), pl.lit("-bit"))
    return (
        pl.when(pl.col("bits").is_not_null())
        .then(bits)
        .otherwise(pl.col("dtype").cast(pl.String))
        .alias("weights")
    )


def _caveats(table: pl.DataFrame) -> list[str]:
    """What a reader must know before comparing, only where it applies."""
    done = table.filter(pl.col("status") == "ok")
    notes = []
    if done.filter((pl.col("device") == "cpu") & (pl.col("engine") == "mlx")).height:
        notes.append(
            "MLX ran on its CPU build, which says nothing about a Mac's GPU: compare learning "
            "here, not speed."
        )
    if done["bits"].n_unique() > 1:
        notes.append(
            "Quantized runs start from other weights than whole ones, so their losses stand on "
            "another base."
        )
    if "published" in done["recipe"]:
        notes.append(
            "Under recipe `published` the engines use different optimizers: their losses are not "
            "comparable."
        )
    if done["examples_sha256"].n_unique() > 1:
        notes.append("Losses at different contexts are over different rows.")
    return ["\n".join(f"- {note}" for note in notes)] if notes else []


def _endings(table: pl.DataFrame) -> str:
    failed = table.filter(pl.col("status") != "ok")
    return "\n".join(
        f"- {row['backend']}, {row['model']}, {row['context']} tokens ({row['variant']}): "
        f"{row['status']}. {row['reason'] or ''}".rstrip()
        for row in failed.iter_rows(named=True)
    )


def _machines(table: pl.DataFrame) -> str:
    places = table.select("chip", "os", "device").unique(maintain_order=True)
    return "\n".join(
        f"- {row['device'] or 'no device'}: {row['chip']}, {row['os']}"
        for row in places.iter_rows(named=True)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
