"""One training run from its settings to its published row: start the trainer, wait, publish."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from workflow_scripts.lib import batches, checkpoints, device_lock, endings, guard, live, measure
from workflow_scripts.lib.adapter_card import adapter_card
from workflow_scripts.lib.joblog import announce, say
from workflow_scripts.lib.jsonl import read_json, write_json, write_jsonl
from workflow_scripts.lib.limits import Limits
from workflow_scripts.lib.machine import describe_machine, usable_cores
from workflow_scripts.lib.rows import make_row
from workflow_scripts.lib.training import CHECKPOINTS, figures_of_steps

PACKAGES = {
    "torch": ("torch", "transformers", "trl", "peft", "accelerate"),
    "mlx": ("mlx", "mlx-lm"),
}
OF_AN_ATTEMPT = ("result.json", "figures.json", guard.DEVICE_FILE, "adapter")
OF_A_RUN = ("steps.jsonl", "memory.jsonl", "started.json", CHECKPOINTS)
DONE = ("ok", "diverged")  # of no use to go on from


def train_and_publish(
    trainer: str,
    settings: dict,
    limits: dict,
    model_folder: str | Path,
    initial_adapter: str | Path,
    train_file: str | Path,
    val_file: str | Path,
    code: Iterable[str | Path],
    state_folder: str | Path,
    row_file: str | Path,
    steps_file: str | Path,
    memory_file: str | Path,
    adapter_folder: str | Path,
    log_file: str | Path,
) -> dict:
    """Run a trainer module as a child and publish its row, steps, memory samples and adapter.

    The child writes live into `state_folder`, which no rule declares as output: Snakemake deletes
    declared outputs before a rerun and after a failure. A run that was cut off goes on from its
    last checkpoint there, if that is of the same settings, inputs and code. Every status publishes
    all four, an empty file or folder where there is nothing.

    `limits` are the keys of the config's section `memory`, and `timeout_seconds` and
    `checkpoint_seconds`: no figure of a run depends on them, so neither do reruns.

    Raises endings.BugError with the end of the child's log when it failed by a bug, and
    endings.InterruptedRunError when it was ended from outside; a rerun goes on then.
    """
    state = Path(state_folder)
    state.mkdir(parents=True, exist_ok=True)
    published = (row_file, steps_file, memory_file, adapter_folder)
    leave_with_snakemake = guard.orphan_check()
    if not settings["engine_installed"]:
        with _alone_in(state, leave_with_snakemake):
            _remove(state, OF_AN_ATTEMPT + OF_A_RUN)
            row = make_row(settings, _unavailable(settings["engine"]), describe_machine())
            _publish(row, state, *published, model_folder)
        say(f"{row['status']}: {row['reason']}")
        return row
    device = device_lock.device_name(settings["device"], sys.platform, dict(os.environ))
    with (
        device_lock.alone_on(device, str(state), leave_with_snakemake) as device_held,
        _alone_in(state, leave_with_snakemake) as run_held,
    ):
        fingerprints = measure.fingerprints(model_folder, initial_adapter, train_file, val_file)
        whole = {
            **settings,
            "head_chunk": batches.head_chunk(settings["context"]),
            "model_folder": str(model_folder),
            "initial_adapter": str(initial_adapter),
            "train_file": str(train_file),
            "val_file": str(val_file),
            "state_folder": str(state),
            "checkpoint_seconds": limits["checkpoint_seconds"],
            "fingerprints": fingerprints,
            "identity": identity(settings, fingerprints, code),
        }
        whole["resume"] = prepare_state(state, whole["identity"])
        result = _run_trainer(trainer, whole, limits, (device_held, run_held), log_file)
        row = make_row(settings, result, describe_machine())
        _publish(row, state, *published, model_folder)
        if row["status"] in DONE:
            _remove(state, [CHECKPOINTS])
    say(f"{row['status']}" + (f": {row['reason']}" if row["reason"] else ""))
    return row


def identity(settings: dict, fingerprints: dict, code: Iterable[str | Path]) -> dict:
    """Return what a checkpoint must have been made with to go on from it."""
    return {
        **{key: value for key, value in settings.items() if key != "engine_installed"},
        **fingerprints,
        "code_sha256": measure.sha256_of(sorted(map(str, code))),
        "versions": measure.versions(PACKAGES[settings["engine"]]),
    }


def prepare_state(state: Path, identity: dict) -> str | None:
    """Clear a state folder for a run and return the checkpoint to go on from, or None.

    What an earlier attempt left is kept only with a good checkpoint of the same run.
    """
    _remove(state, OF_AN_ATTEMPT)
    refused: list[str] = []
    steps = len(measure.read_steps(state / "steps.jsonl"))
    found = checkpoints.latest(state / CHECKPOINTS, identity, steps, refused.append)
    for reason in refused:
        announce(reason)
    if found:
        announce(f"going on from the checkpoint after step {found.step}")
        _mend(state / "memory.jsonl")
        return str(found.folder)
    if refused:
        announce("starting from the first step")
    _remove(state, OF_A_RUN)
    return None


def cut_off_result(state: Path, settings: dict, stop: endings.Stop, log: Iterable[str]) -> dict:
    """Return what is known of a run that ended at a limit, out of memory or by an abort.

    Its figures are those that the trainer left in `figures.json`, of the steps that it wrote, and
    of the last sample.
    """
    figures = live.read_object(state / "figures.json")
    last = next(reversed(live.last_objects(state / "memory.jsonl")), {})
    of_steps = figures_of_steps(
        measure.read_steps(state / "steps.jsonl"), settings, figures.get("matmul_peak_flops")
    )
    return {
        **settings["fingerprints"],
        **figures,
        **{key: last[key] for key in ("peak_device_bytes", "peak_reserved_bytes") if key in last},
        **of_steps,
        "status": stop.status,
        "reason": f"{stop.reason}, after step {of_steps['last_step']} of "
        f"{settings['optimizer_steps']}; {endings.smaller(settings)}",
        "log_end": "\n".join(log),
    }


def _run_trainer(
    trainer: str, settings: dict, limits: dict, locks: tuple[int, ...], log_file: str | Path
) -> dict:
    state = Path(settings["state_folder"])
    write_json(state / "settings.json", settings)
    if "started_at" not in live.read_object(state / "started.json"):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(state / "started.json", {"started_at": now})
    ending = guard.run_child(
        [sys.executable, "-m", trainer, str(state / "settings.json")],
        guard.child_environment(
            {**os.environ, live.PLACE: live.place(state)},
            usable_cores(),
            limits["mps_watermark"],
            limited=limits["limit_bytes"] is not None,
        ),
        log_file,
        state / "memory.jsonl",
        Limits(
            process_bytes=limits["limit_bytes"],
            swap_growth_bytes=limits["swap_growth_bytes"],
            swap_window_seconds=limits["swap_window_seconds"],
            seconds=limits["timeout_seconds"],
        ),
        lambda columns: live.live_line(state, columns),
        locks,
    )
    stop = endings.name_ending(ending.exit_code, ending.last_lines, ending.stop, ending.evidence)
    result = (
        cut_off_result(state, settings, stop, ending.last_lines)
        if stop
        else read_json(state / "result.json")
    )
    return {
        **result,
        **read_json(state / "started.json"),
        "wall_seconds": ending.wall_seconds,
        "peak_process_bytes": ending.peak_process_bytes,
        "swap_growth_bytes": ending.swap_growth_bytes,
    }


def _unavailable(engine: str) -> dict:
    packages = {"torch": "torch, trl and peft", "mlx": "mlx and mlx-lm"}[engine]
    reason = f"{packages} are not installed here; install the extra '{engine}' and run again"
    return {"status": "unavailable", "reason": reason}


@contextmanager
def _alone_in(state: Path, tick: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold the run's lock and yield its descriptor: two workflows must not write the same state."""
    with open(state / "lock", "w") as lock:
        device_lock.wait_for(lock.fileno(), lambda: f"another process trains in {state}", tick)
        yield lock.fileno()


def _publish(
    row: dict,
    state: Path,
    row_file: str | Path,
    steps_file: str | Path,
    memory_file: str | Path,
    adapter_folder: str | Path,
    model_folder: str | Path,
) -> None:
    _publish_file(state / "steps.jsonl", Path(steps_file))
    _publish_file(state / "memory.jsonl", Path(memory_file))
    if (state / "adapter").is_dir():
        card = adapter_card(row, model_folder, adapter_folder)
        (state / "adapter/README.md").write_text(card, "utf-8")
    _publish_folder(state / "adapter", Path(adapter_folder))
    write_json(row_file, row)


def _publish_file(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, temporary)
    else:
        temporary.write_bytes(b"")
    os.replace(temporary, target)


def _publish_folder(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, temporary)
    else:
        temporary.mkdir(parents=True)
    os.replace(temporary, target)


def _mend(file: Path) -> None:
    """Keep the whole lines of a file that goes on: after a power cut there may be others."""
    if file.is_file():
        write_jsonl(file, list(live.whole_objects(file.read_bytes().split(b"\n"))))


def _remove(state: Path, names: Iterable[str]) -> None:
    for name in names:
        path = state / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
