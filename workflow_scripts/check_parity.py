"""Rule check_parity: whether both engines, as installed here, solve the same problem."""

import sys
import tempfile
from pathlib import Path

import polars as pl

from workflow_scripts.lib import joblog, jsonl, measure, parity, tables

PACKAGES = ("torch", "transformers", "trl", "peft", "mlx", "mlx-lm")
TITLE = "# Do PyTorch and MLX solve the same problem here?"


def check_parity(report_file: str | Path) -> None:
    """Run every check and write them as a table, with the versions they hold for.

    Raises ValueError naming each check that doesn't hold, after all are done.
    """
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for check in parity.checks(Path(folder)):
            joblog.say(_in_words(check))
            done.append(check)
    if failed := [check for check in done if not check.holds]:
        raise ValueError(
            f"{len(failed)} of {len(done)} checks do not hold, so losses of the two engines must "
            f"not be compared: {'; '.join(map(_in_words, failed))}"
        )
    with jsonl.atomic_writer(report_file) as file:
        file.write(text_of(done, measure.versions(PACKAGES)))


def text_of(done: list[parity.Check], versions: dict[str, str]) -> str:
    """The checks as people read them."""
    table = pl.DataFrame(
        {
            "what must agree": [check.what for check in done],
            "apart": [f"{check.found:.1e}" if check.found else "0" for check in done],
            "allowed": [f"{check.allowed:.0e}" if check.allowed else "0" for check in done],
        }
    )
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    answer = (
        f"Yes, on the CPU in float32, with {installed}. Losses, gradients and adapters are "
        "compared by relative distance, counts and accuracies by their difference."
    )
    return f"{TITLE}\n\n{answer}\n\n{tables.markdown_table(table)}\n"


def _in_words(check: parity.Check) -> str:
    return f"{check.what}: {check.found:.1e} apart, {check.allowed:.0e} allowed"


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        check_parity(report_file=snakemake.output.report)
    print(f"PyTorch and MLX agree: {snakemake.output.report}", file=sys.stderr)
