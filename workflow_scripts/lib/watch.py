"""Show how far a study is, while it trains, from any terminal.

python -m workflow_scripts.lib.watch                 # the study that changed last
python -m workflow_scripts.lib.watch results/STUDY
python -m workflow_scripts.lib.watch --once          # one table, plain text
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from workflow_scripts.lib.live import Progress, clock, is_study, read_study, size, written

SECONDS_BETWEEN_LOOKS = 1.0
PLAIN_COLUMNS = 160
UNBOUNDED = Console(width=1000).options
LINES_BESIDE_ROWS = 4  # title, headings, the rest counted, the cursor
STYLES = {"ok": "green", "waiting": "dim", "stopped": "red"}


class Column(NamedTuple):
    """One column of the table: its heading, and what it says of a run."""

    heading: str
    text: Callable[[Progress], str]
    right: bool = True


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _steps(run: Progress) -> str:
    return f"{run.step}/{run.total or '?'}"


def _steps_and_share(run: Progress) -> str:
    return f"{_steps(run)} {run.step / run.total:4.0%}" if run.total else _steps(run)


RUN = Column("run", lambda run: run.run.replace("/", " "), right=False)
STATUS = Column("status", lambda run: run.status, right=False)
STEP = Column("step", _steps_and_share)
STEP_ALONE = Column("step", _steps)
LOSS = Column("loss", lambda run: _number(run.loss, ".2f"))
SPEED = Column("tokens/s", lambda run: _number(run.tokens_per_s, ",.0f"))
MEMORY = Column("memory", lambda run: size(run.process_bytes or run.peak_process_bytes))
DEVICE = Column("device", lambda run: size(run.device_bytes))
ELAPSED = Column("elapsed", lambda run: clock(run.elapsed))
LEFT = Column("left", lambda run: clock(run.remaining))
# Layouts from wide to narrow, with the spaces between columns: the first that fits is taken.
LAYOUTS = (
    (2, (RUN, STATUS, STEP, LOSS, SPEED, MEMORY, DEVICE, ELAPSED, LEFT)),
    (1, (RUN, STATUS, STEP, LOSS, SPEED, MEMORY, DEVICE, ELAPSED, LEFT)),
    (1, (RUN, STATUS, STEP, LOSS, SPEED, MEMORY, ELAPSED, LEFT)),
    (1, (RUN, STATUS, STEP_ALONE, LOSS, SPEED, MEMORY, ELAPSED, LEFT)),
    (1, (RUN, STATUS, STEP_ALONE, LOSS, SPEED, MEMORY, LEFT)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the study that the command line names and return the exit status.

    On a terminal the table is drawn anew each second until all runs are done or Ctrl-C; elsewhere,
    or with --once, it is printed once.
    """
    parser = argparse.ArgumentParser(
        prog="python -m workflow_scripts.lib.watch", description="Show how far a study is."
    )
    parser.add_argument("study", nargs="?", help="its folder; else the one that changed last")
    parser.add_argument("--once", action="store_true", help="print one table, as plain text")
    options = parser.parse_args(arguments)
    try:
        study = Path(options.study) if options.study else newest_study(Path("results"))
        if options.once or not sys.stdout.isatty():
            width = None if sys.stdout.isatty() else PLAIN_COLUMNS
            console = Console(width=width, force_terminal=False, no_color=True)
            console.print(table(study.resolve().name, read_study(study), console))
        else:
            watch(study, Console())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def newest_study(results: Path) -> Path:
    """Return the study under `results` that changed last; raises ValueError when there is none."""
    studies = [folder for folder in results.glob("*") if is_study(folder)]
    if not studies:
        raise ValueError(f"{results}/: no study here; start one with: snakemake --cores 1 all")
    return max(studies, key=_changed)


def watch(study: Path, console: Console) -> None:
    """Draw the study anew each second until all its runs are done."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            runs = read_study(study)
            live.update(table(study.resolve().name, runs, console, console.height), refresh=True)
            if all(run.done for run in runs):
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)


def table(
    name: str, runs: Sequence[Progress], console: Console, height: int | None = None
) -> Group:
    """Return a study's title and table, in the console's width and within `height` lines.

    Where not all runs fit, those that go on are shown and those around them; the rest is counted.
    """
    shown = runs if height is None else most_telling(runs, max(height - LINES_BESIDE_ROWS, 1))
    parts = [_title(name, runs), _fitting(shown, console)]
    if rest := Counter(run.status for run in runs if run not in shown):
        counts = ", ".join(f"{count} {status}" for status, count in rest.items())
        parts.append(Text(f"and {rest.total()} more: {counts}", style="dim"))
    return Group(*parts)


def most_telling(runs: Sequence[Progress], count: int) -> list[Progress]:
    """Return up to `count` runs in their order: active ones, stopped ones, those around them."""
    here = next((number for number, run in enumerate(runs) if run.active), 0)

    def rank(number: int) -> tuple:
        run = runs[number]
        return (not run.active, run.status != "stopped", abs(number - here))

    return [runs[number] for number in sorted(sorted(range(len(runs)), key=rank)[:count])]


def _title(name: str, runs: Sequence[Progress]) -> Text:
    done = sum(run.done for run in runs)
    elapsed = clock(sum(run.elapsed or 0.0 for run in runs))
    return Text.assemble((name, "bold"), f": {done} of {len(runs)} runs done, {elapsed} elapsed")


def _fitting(runs: Sequence[Progress], console: Console) -> Table:
    """The table in the first layout that fits; if none does, the last one with shortened names."""
    for spaces, columns in LAYOUTS:
        if not any(run.device_bytes for run in runs):
            columns = tuple(column for column in columns if column is not DEVICE)
        drawn = _drawn(runs, columns, spaces)
        excess = Measurement.get(console, UNBOUNDED, drawn).maximum - console.width
        if excess <= 0:
            return drawn
    room = max(len(run.run) for run in runs) - excess
    short = [run._replace(run=_shortened(run.run, room)) for run in runs]
    return _drawn(short, columns, spaces)


def _shortened(run: str, room: int) -> str:
    """A run's name in at most so many characters, its end kept: runs of a model differ there."""
    if len(run) <= room:
        return run
    end = "…/" + "/".join(run.split("/")[-2:])
    return run[: max(room - len(end), 0)] + end


def _drawn(runs: Sequence[Progress], columns: Sequence[Column], spaces: int) -> Table:
    drawn = Table(box=None, padding=(0, spaces, 0, 0), pad_edge=False)
    for column in columns:
        justify = "right" if column.right else "left"
        drawn.add_column(column.heading, justify=justify, no_wrap=True)
    for run in runs:
        style = STYLES.get(run.status, "red" if run.done else "bold")
        drawn.add_row(*(Text(column.text(run)) for column in columns), style=style)
    return drawn


def _changed(study: Path) -> float:
    """When a study's grid, memory samples or rows were last written, in seconds since 1970."""
    patterns = ("state/runs.json", "state/*/*/*/*/memory.jsonl", "runs/*/*/*/*/row.json")
    return max((written(path) for each in patterns for path in study.glob(each)), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
