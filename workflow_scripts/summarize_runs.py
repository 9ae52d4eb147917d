"""One table over all runs, as CSV, as text for people, and with every step as a database."""

from collections.abc import Sequence

from workflow_scripts.lib import joblog
from workflow_scripts.lib.comparison import read_row, summary_text, table_of
from workflow_scripts.lib.database import Run, write_database
from workflow_scripts.lib.jsonl import atomic_writer, read_json
from workflow_scripts.lib.tables import counted


def summarize_runs(
    study: str,
    row_files: Sequence[str],
    steps_files: Sequence[str],
    memory_files: Sequence[str],
    examples_files: Sequence[str],
    sessions_stats_file: str,
    table_file: str,
    text_file: str,
    database_file: str,
    missing: Sequence[str] = (),
) -> None:
    """Write summary.csv, summary.md and study.sqlite from the files of the runs.

    The files of the runs stand in the same order, that of the study's grid; `missing` names the
    runs of the grid that have no row yet.
    """
    rows = [read_row(file) for file in row_files]
    table = table_of(rows)
    stats = read_json(sessions_stats_file)
    data = {
        "session files": f"{stats['files']:,}, of which unreadable {stats['skipped_files']:,}",
        "sessions": f"{stats['sessions']:,}",
        "conversations": f"{stats['conversations']:,}",
        "supervised assistant turns": f"{stats['supervised_turns']:,}",
        "lines": f"{stats['lines_read']:,} read, {stats['lines_rejected']:,} rejected",
        "secrets replaced": counted(stats["redacted"]) or "none",
        "rejected": counted(stats["rejected"]) or "nothing",
        "assistant turns removed": counted(stats["removed"]) or "none",
    }
    with atomic_writer(table_file) as file:
        file.write(table.write_csv())
    with atomic_writer(text_file) as file:
        file.write(summary_text(study, table, data, missing))
    runs = [Run(*files) for files in zip(rows, steps_files, memory_files, strict=True)]
    write_database(database_file, runs, examples_files)
    joblog.say(f"{table.height} runs, {len(missing)} missing")


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        summarize_runs(
            study=snakemake.params.study,
            row_files=snakemake.input.rows,
            steps_files=snakemake.input.steps,
            memory_files=snakemake.input.memory,
            examples_files=snakemake.input.examples,
            sessions_stats_file=snakemake.input.stats,
            table_file=snakemake.output.table,
            text_file=snakemake.output.text,
            database_file=snakemake.output.database,
        )
