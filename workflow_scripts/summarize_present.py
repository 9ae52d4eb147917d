"""The summary of the runs that are there already, naming those that are missing."""

from collections.abc import Sequence
from pathlib import Path

from workflow_scripts.lib import joblog
from workflow_scripts.lib.jsonl import read_json
from workflow_scripts.plot_runs import plot_runs
from workflow_scripts.summarize_runs import summarize_runs

FILES = ("row.json", "steps.jsonl", "memory.jsonl")


def summarize_present(study: str, results_folder: str, run_folders: Sequence[str]) -> Path:
    """Summarize the runs that have ended, into present/ beside the study's own summary.

    Returns the path of the text. Raises FileNotFoundError when no run has a row yet.
    """
    results = Path(results_folder)
    runs = {run: results / "runs" / run for run in run_folders}
    present = [
        run for run, folder in runs.items() if all((folder / name).is_file() for name in FILES)
    ]
    if not present:
        raise FileNotFoundError(
            f"{results}/runs: no run of the study has ended yet; see {results}/logs"
        )
    to = results / "present"
    rows = [str(runs[run] / "row.json") for run in present]
    steps = [str(runs[run] / "steps.jsonl") for run in present]
    examples = {
        results / "examples" / row["tokenizer"] / str(row["context"]) / "stats.json"
        for row in map(read_json, rows)
    }
    summarize_runs(
        study=study,
        row_files=rows,
        steps_files=steps,
        memory_files=[str(runs[run] / "memory.jsonl") for run in present],
        examples_files=sorted(str(file) for file in examples if file.is_file()),
        sessions_stats_file=str(results / "sessions/stats.json"),
        table_file=str(to / "summary.csv"),
        text_file=str(to / "summary.md"),
        database_file=str(to / "study.sqlite"),
        missing=[run for run in run_folders if run not in present],
    )
    plots = to / "plots"
    plot_runs(
        row_files=rows,
        steps_files=steps,
        loss_file=str(plots / "loss.svg"),
        speed_file=str(plots / "speed.svg"),
        memory_file=str(plots / "memory.svg"),
        run_plot_files=[str(plots / f"{run}.svg") for run in present],
    )
    return to / "summary.md"


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        summarize_present(
            study=snakemake.params.study,
            results_folder=snakemake.params.results,
            run_folders=snakemake.params.runs,
        )
