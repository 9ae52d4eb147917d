"""How far the runs of a study are, read from its folder while they train.

Whoever watches writes nothing, and takes files that grow, vanish or are replaced as they come.
Units: bytes are bytes, times are seconds, speeds are tokens per second.
"""

import fcntl
import json
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from workflow_scripts.lib.jsonl import read_json

PLACE = "FINETUNE_PLACE"  # environment variable of a training child: "run 2 of 5"
RECENT_STEPS = 20
TAIL_BYTES = 16_384  # of a line of 250 bytes a step, well above RECENT_STEPS
SECONDS_FRESH = 3.0  # memory is sampled each second
ACTIVE = ("preparing", "validating", "training", "finishing")
STEP_LINE = re.compile(r"[\d:]+ (run \d+ of \d+, )?step \d+ of \d+: ")
STEP_KEYS = {"step", "loss", "seconds", "tokens", "device_bytes"}


class Progress(NamedTuple):
    """How far one run is; None where a figure is not known or does not apply.

    `status` is that of its row where there is one (then the run is `done`), else one of ACTIVE,
    "stopped" (it was cut off or failed) or "waiting". `process_bytes` is the memory now.
    """

    run: str  # its folder: backend/model/context/variant
    status: str
    done: bool = False
    step: int = 0
    total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    process_bytes: int | None = None
    peak_process_bytes: int | None = None
    device_bytes: int | None = None
    elapsed: float | None = None
    remaining: float | None = None

    @property
    def active(self) -> bool:
        return self.status in ACTIVE


class Planned(NamedTuple):
    """What the grid says of a run: its optimizer steps, where known, and since when it is to be
    trained: an older row (seconds since 1970) was made with other settings or inputs.
    """

    total: int | None = None
    since: float = 0.0


class Pace(NamedTuple):
    """Speed of the recent steps: the typical tokens per second, and the mean seconds of a step."""

    tokens_per_s: float
    step_seconds: float


def is_study(folder: str | Path) -> bool:
    """Say whether a folder holds runs, going on or finished."""
    return any(Path(folder, part).is_dir() for part in ("state", "runs"))


def read_study(folder: str | Path) -> list[Progress]:
    """Return how far each run is, in the order of the grid.

    A study without `state/runs.json` (of an older version) lists what it has, by name. Raises
    ValueError for a folder that is not a study's.
    """
    study = Path(folder)
    if not is_study(study):
        what = "it has neither state/ nor runs/" if study.is_dir() else "there is no such folder"
        raise ValueError(f"{folder}: not a study, {what}")
    grid = _grid(study) or dict.fromkeys(_runs_found(study), Planned())
    return [read_run(study, run, planned) for run, planned in grid.items()]


def read_run(study: str | Path, run: str, planned: Planned) -> Progress:
    """Return how far one run of a study is; `run` is its folder below `runs/` and `state/`."""
    state, published = Path(study, "state", run), Path(study, "runs", run)
    alive = _is_alive(state)
    row_file = published / "row.json"  # read after that: a run that just ended has its row now
    row = read_object(row_file) if written(row_file) >= planned.since else {}
    if isinstance(row.get("status"), str):
        return _finished(run, row, published / "steps.jsonl", planned.total)
    return _unfinished(run, state, planned.total, alive)


def pace_of(steps: Sequence[tuple[int, float]]) -> Pace | None:
    """Return the pace of steps given as (tokens, seconds); None without any.

    The speed is the median of theirs, which a step that waited for a compiler does not move.
    """
    steps = [(tokens, seconds) for tokens, seconds in steps if seconds > 0]
    if not steps:
        return None
    return Pace(
        statistics.median(tokens / seconds for tokens, seconds in steps),
        statistics.fmean(seconds for _, seconds in steps),
    )


def place(state_folder: str | Path) -> str:
    """Return the place of a run in its study, as in "run 2 of 5"; "" where that is not known."""
    study, run = _study_and_run(state_folder)
    runs = list(_grid(study))
    return f"run {runs.index(run) + 1} of {len(runs)}" if run in runs else ""


def live_line(state_folder: str | Path, columns: int) -> str:
    """Return one line on the run that trains in a folder, in at most so many columns.

    Where they do not suffice, the run's name goes first, since its place in the study says it too;
    then the smaller of the memories of process and device.
    """
    _, run = _study_and_run(state_folder)
    now = _unfinished(run, Path(state_folder), None, alive=True)
    training = now.status == "training"
    parts = {
        "place": place(state_folder),
        "run": run.replace("/", " "),
        "status": f"step {now.step} of {now.total}" if training else now.status,
        "loss": "" if now.loss is None else f"loss {now.loss:.2f}",
        "speed": "" if now.tokens_per_s is None else f"{now.tokens_per_s:,.0f} tokens/s",
        "memory": size(now.process_bytes),
        "device": _on_device(now.device_bytes),
        "left": f"{clock(now.remaining)} left" if training else clock(now.elapsed),
    }
    memories = {"memory": now.process_bytes or 0, "device": now.device_bytes or 0}
    for less_telling in ("run", *sorted(memories, key=memories.get), "speed", "loss"):
        if len("  ".join(filter(None, parts.values()))) <= columns:
            break
        del parts[less_telling]
    return "  ".join(filter(None, parts.values()))[:columns]


def step_line(
    place: str,
    step: int,
    total: int,
    loss: float,
    tokens_per_s: float,
    process_bytes: int,
    device_bytes: int | None,
    remaining: float,
) -> str:
    """Return what a training says of a step in its log; `is_step_line` knows it again."""
    memory = ", ".join(filter(None, (size(process_bytes), _on_device(device_bytes))))
    return (
        f"{place}{', ' if place else ''}step {step} of {total}: loss {loss:.4f}, "
        f"{tokens_per_s:,.0f} tokens/s, {memory}, {remaining:,.0f} s remaining"
    )


def is_step_line(line: str) -> bool:
    """Say whether a line of a training's log, with its time in front, came from `step_line`."""
    return STEP_LINE.match(line) is not None


def size(count: int | None) -> str:
    """Return bytes as people read them: "312 MB" (of 10^6 bytes), "1.53 GB"; "" for None."""
    if count is None:
        return ""
    if count < 999.5e6:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e9:#.3g}".rstrip(".") + " GB"


def clock(seconds: float | None) -> str:
    """Return seconds as "0:14" or "1:02:05"; "" for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def written(path: Path) -> float:
    """Return when a file was written, in seconds since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_objects(path: str | Path) -> list[dict]:
    """The objects of the whole lines at the end of a JSONL file; none where there is no file."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return list(whole_objects(lines[1 if start else 0 : -1]))  # both ends may be half a line


def whole_objects(lines: Iterable[bytes]) -> Iterator[dict]:
    """Yield the objects among lines of JSON; a crash may have left half a line, or zeros."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_object(path: str | Path) -> dict:
    """The object in a JSON file; empty where there is none, or no file."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _on_device(count: int | None) -> str:
    return f"{size(count)} on the device" if count else ""


def _unfinished(run: str, state: Path, total: int | None, alive: bool) -> Progress:
    settings = read_object(state / "settings.json")
    total = total or settings.get("optimizer_steps")
    if not alive and (not settings or (state / "result.json").exists()):
        return Progress(run, "waiting", total=total)  # nothing there, or left by a run to be redone
    steps = _last_steps(state / "steps.jsonl")
    memory = next(reversed(last_objects(state / "memory.jsonl")), {})
    last = steps[-1] if steps else {}
    now = Progress(
        run,
        "stopped",
        step=last.get("step", 0),
        total=total,
        loss=last.get("loss"),
        peak_process_bytes=memory.get("peak_process_bytes"),
        elapsed=memory.get("seconds"),
    )
    if not alive:
        return now
    now = now._replace(
        status=_phase(state, now.step, total),
        process_bytes=memory.get("process_bytes"),
        device_bytes=last.get("device_bytes"),
    )
    pace = pace_of([(step["tokens"], step["seconds"]) for step in _settled(steps)])
    if pace is None:
        return now
    now = now._replace(tokens_per_s=pace.tokens_per_s)
    if now.status != "training" or not total:
        return now
    waited = min(_age(state / "steps.jsonl"), pace.step_seconds)
    return now._replace(remaining=pace.step_seconds * (total - now.step) - waited)


def _phase(state: Path, step: int, total: int | None) -> str:
    """What a training does now, told by the files that it has written so far."""
    if (state / "result.json").exists():
        return "finishing"
    if not (state / "figures.json").exists():
        return "preparing"
    return "training" if step and step != total else "validating"


def _finished(run: str, row: dict, steps_file: Path, total: int | None) -> Progress:
    last = next(reversed(_last_steps(steps_file)), {})
    step = row.get("last_step") or 0
    return Progress(
        run,
        row["status"],
        done=True,
        step=step,
        total=step if row["status"] == "ok" else total,
        loss=last.get("loss"),
        tokens_per_s=row.get("tokens_per_s"),
        peak_process_bytes=row.get("peak_process_bytes"),
        device_bytes=row.get("peak_device_bytes"),
        elapsed=row.get("wall_seconds"),
    )


def _is_alive(state: Path) -> bool:
    """Whether someone trains here: memory was sampled just now, or the run's lock is held.

    The lock is asked only where samples are old. To test it is to hold it for an instant; a
    training that starts right then waits for that instant and goes on.
    """
    if _age(state / "memory.jsonl") < SECONDS_FRESH:
        return True
    try:
        with open(state / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system that has none
        return False
    return False


def _age(path: Path) -> float:
    return abs(time.time() - written(path))


def _grid(study: Path) -> dict[str, Planned]:
    """The runs of the grid in order, as the workflow left them when it started; or none."""
    file = study / "state/runs.json"
    started = written(file)
    return {
        each["run"]: Planned(each.get("optimizer_steps"), started if each.get("to_train") else 0.0)
        for each in read_object(file).get("runs", [])
    }


def _runs_found(study: Path) -> list[str]:
    found = [
        path.parent.relative_to(study / part).as_posix()
        for part, file in (("runs", "row.json"), ("state", "settings.json"))
        for path in (study / part).glob(f"*/*/*/*/{file}")
    ]
    return sorted(set(found))


def _study_and_run(state_folder: str | Path) -> tuple[Path, str]:
    state = Path(state_folder).resolve()
    return state.parents[4], "/".join(state.parts[-4:])


def _settled(steps: list[dict]) -> list[dict]:
    """Steps without the training's first, in which engines compile, where there are others."""
    return [step for step in steps if step["step"] > 1] or steps


def _last_steps(path: Path) -> list[dict]:
    return [step for step in last_objects(path) if step.keys() >= STEP_KEYS][-RECENT_STEPS:]
