"""Loss by step, speed and memory of all runs, and the steps of each run, as SVG."""

from collections.abc import Sequence

import polars as pl

from workflow_scripts.lib import charts, joblog
from workflow_scripts.lib.comparison import read_row, table_of
from workflow_scripts.lib.database import STEP_FIELDS
from workflow_scripts.lib.headings import MEGA
from workflow_scripts.lib.jsonl import read_jsonl


def plot_runs(
    row_files: Sequence[str],
    steps_files: Sequence[str],
    loss_file: str,
    speed_file: str,
    memory_file: str,
    run_plot_files: Sequence[str],
) -> None:
    """Draw the charts of a study; the file lists stand in the same order, that of the grid."""
    table = charts.with_panels(table_of([read_row(file) for file in row_files]))
    steps_of_runs = [_read_steps(file) for file in steps_files]
    named = [
        steps.with_columns(pl.lit(row[key]).alias(key) for key in ("panel", "backend", "variant"))
        for row, steps in zip(table.iter_rows(named=True), steps_of_runs, strict=True)
    ]
    charts.save_svg(charts.loss_chart(pl.concat(named)), loss_file)
    charts.save_svg(charts.bar_chart(table, "tokens_per_s", "real tokens per second"), speed_file)
    memory = charts.bar_chart(table, "peak_process_bytes", "peak process memory (MB)", 1 / MEGA)
    charts.save_svg(memory, memory_file)
    for row, steps, file in zip(
        table.iter_rows(named=True), steps_of_runs, run_plot_files, strict=True
    ):
        title = f"{row['backend']}, {row['panel']}, {row['variant']}: {row['status']}"
        charts.save_svg(charts.run_chart(title, steps), file)
    joblog.say(f"{len(steps_files)} runs drawn")


def _read_steps(file: str) -> pl.DataFrame:
    schema = dict.fromkeys(STEP_FIELDS, pl.Float64)
    return pl.DataFrame(list(read_jsonl(file)), schema=schema, strict=False)


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        plot_runs(
            row_files=snakemake.input.rows,
            steps_files=snakemake.input.steps,
            loss_file=snakemake.output.loss,
            speed_file=snakemake.output.speed,
            memory_file=snakemake.output.memory,
            run_plot_files=snakemake.output.runs,
        )
