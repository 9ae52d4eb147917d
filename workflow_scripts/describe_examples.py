"""Rule describe_examples: figures of sessions and examples -> a page, a table and a histogram."""

from pathlib import Path

from workflow_scripts.lib import charts, joblog, jsonl
from workflow_scripts.lib import description as describing


def describe_examples(
    sessions_stats: str | Path,
    examples_stats: list[str],
    description: str | Path,
    table: str | Path,
    lengths: str | Path,
) -> None:
    """Write what there is to learn from: a Markdown page, the same as CSV, lengths as SVG.

    `examples_stats` are the stats.json of every tokenizer and context; their paths name both.
    """
    stats = {tuple(Path(path).parts[-3:-1]): jsonl.read_json(path) for path in examples_stats}
    frame = describing.rows_of(stats)
    with jsonl.atomic_writer(table) as file:
        file.write(frame.write_csv())
    with jsonl.atomic_writer(description) as file:
        file.write(describing.page_of(jsonl.read_json(sessions_stats), frame, stats))
    charts.save_svg(describing.chart_of(stats), lengths)
    joblog.say(f"{description}: {frame.height} sets of rows")


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        describe_examples(
            sessions_stats=snakemake.input.sessions,
            examples_stats=snakemake.input.examples,
            description=snakemake.output.description,
            table=snakemake.output.table,
            lengths=snakemake.output.lengths,
        )
