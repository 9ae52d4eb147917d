"""The rows of a study as one table, and the table as text for people."""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from workflow_scripts.lib import headings
from workflow_scripts.lib.caveats import agreements, caveats, run_name, same_problem
from workflow_scripts.lib.headings import Columns, Section
from workflow_scripts.lib.jsonl import read_json
from workflow_scripts.lib.rows import ROW_FIELDS, checked_row
from workflow_scripts.lib.tables import markdown_table


def read_row(path: str | Path) -> dict:
    """Read a row.json file; raises ValueError naming a file that is not a row."""
    return checked_row(read_json(path), path)


def table_of(found: Sequence[dict]) -> pl.DataFrame:
    """Return a table with one column per field of a row; versions, a mapping, become JSON text."""
    rows = []
    for row in found:
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
        markdown_table(named(table, headings.MAIN)),
        "\n".join(f"- {note}" for note in caveats(table)),
    ]
    if missing:
        listed = "\n".join(f"- {run}" for run in missing)
        parts.append(f"Still missing ({_count(len(missing), 'run')}):\n\n{listed}")
    if endings := _endings(table):
        parts.append("## What did not end well\n\n" + endings)
    for section in (headings.SPEED, headings.TIME, headings.OTHER_TOOLS, headings.MEMORY):
        parts += [_heading(section), markdown_table(named(done, section.columns, status=False))]
    parts += [
        _heading(headings.LEARNING),
        markdown_table(_with_problem(done)),
        "\n".join(f"- {note}" for note in agreements(done.to_dicts())),
        "## Data and machine",
        "\n".join(f"- {name}: {value}" for name, value in data.items()),
        _machines(table),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(section: Section) -> str:
    return f"## {section.title}\n\n{section.text}"


def named(table: pl.DataFrame, columns: Columns, status: bool = True) -> pl.DataFrame:
    """Choose columns under headings that people read, each after the name of its run."""
    names = [
        pl.col("backend"),
        pl.col("model"),
        pl.col("context").cast(pl.String).alias("context (tokens)"),
        numbers_column(),
    ]
    if status:
        names.append(_status())
    if table["variant"].n_unique() > 1:
        names.insert(3, pl.col("variant"))
    figures = [
        _figure(field, factor).alias(heading) for heading, (field, factor) in columns.items()
    ]
    return table.select(*names, *figures)


def _status() -> pl.Expr:
    """How a run ended, and whether its speed can be true; see `caveats.implausible`."""
    too_fast = pl.col("utilization").cast(pl.Float64, strict=False) > 1
    return pl.when(too_fast).then(pl.col("status") + ", implausible").otherwise("status")


def _with_problem(done: pl.DataFrame) -> pl.DataFrame:
    chosen = named(done, headings.LEARNING.columns, status=False)
    letters = pl.Series("problem", same_problem(done.to_dicts()), dtype=pl.String)
    return chosen.insert_column(chosen.columns.index("steps"), letters)


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


def _endings(table: pl.DataFrame) -> str:
    failed = table.filter(pl.col("status") != "ok")
    return "\n".join(
        f"- {run_name(row)}: {row['status']}. {row['reason'] or ''}".rstrip()
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
