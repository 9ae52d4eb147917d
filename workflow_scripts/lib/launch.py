"""One training run from its settings to its published row: start the trainer, wait, publish."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from workflow_scripts.lib import batches, guard, live
from workflow_scripts.lib.adapter_card import adapter_card
from workflow_scripts.lib.joblog import say
from workflow_scripts.lib.jsonl import read_json, write_json
from workflow_scripts.lib.machine import describe_machine, usable_cores
from workflow_scripts.lib.rows import make_row


def train_and_publish(
    trainer: str,
    settings: dict,
    model_folder: str | Path,
    initial_adapter: str | Path,
    train_file: str | Path,
    val_file: str | Path,
    state_folder: str | Path,
    row_file: str | Path,
    steps_file: str | Path,
    memory_file: str | Path,
    adapter_folder: str | Path,
    log_file: str | Path,
) -> dict:
    """Run a trainer module as a child and publish its row, steps, memory samples and adapter.

    The child writes live into `state_folder`, which no rule declares as output: Snakemake deletes
    declared outputs before a rerun and after a failure. Every status publishes all four, an empty
    file or folder where there is nothing.

    Raises RuntimeError with the end of the child's log when the child failed by a bug.
    """
    state = Path(state_folder)
    state.mkdir(parents=True, exist_ok=True)
    with _alone_in(state):
        for name in ("result.json", "steps.jsonl", "memory.jsonl"):
            (state / name).unlink(missing_ok=True)
        shutil.rmtree(state / "adapter", ignore_errors=True)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        if settings["engine_installed"]:
            paths = {
                "head_chunk": batches.head_chunk(settings["context"]),
                "model_folder": str(model_folder),
                "initial_adapter": str(initial_adapter),
                "train_file": str(train_file),
                "val_file": str(val_file),
                "state_folder": str(state),
            }
            result = _run_trainer(trainer, {**settings, **paths}, state, log_file)
        else:
            result = _unavailable(settings["engine"])
        row = make_row(settings, result, describe_machine(), {"started_at": started_at})
        _publish_file(state / "steps.jsonl", Path(steps_file))
        _publish_file(state / "memory.jsonl", Path(memory_file))
        if (state / "adapter").is_dir():
            card = adapter_card(row, model_folder, adapter_folder)
            (state / "adapter/README.md").write_text(card, "utf-8")
        _publish_folder(state / "adapter", Path(adapter_folder))
        write_json(row_file, row)
    say(f"{row['status']}" + (f": {row['reason']}" if row["reason"] else ""))
    return row


def _run_trainer(trainer: str, settings: dict, state: Path, log_file: str | Path) -> dict:
    settings_file = state / "settings.json"
    write_json(settings_file, settings)
    ending = guard.run_child(
        [sys.executable, "-m", trainer, str(settings_file)],
        guard.child_environment({**os.environ, live.PLACE: live.place(state)}, usable_cores()),
        log_file,
        state / "memory.jsonl",
        lambda columns: live.live_line(state, columns),
    )
    if ending.exit_code != 0:
        end_of_log = "\n".join(f"  | {line}" for line in ending.last_lines)
        raise RuntimeError(
            f"{trainer} ended with exit code {ending.exit_code}; the end of its log:\n{end_of_log}"
        )
    return {
        **read_json(state / "result.json"),
        "wall_seconds": ending.wall_seconds,
        "peak_process_bytes": ending.peak_process_bytes,
        "swap_growth_bytes": ending.swap_growth_bytes,
    }


def _unavailable(engine: str) -> dict:
    packages = {"torch": "torch, trl and peft", "mlx": "mlx and mlx-lm"}[engine]
    reason = f"{packages} are not installed here; install the extra '{engine}' and run again"
    return {"status": "unavailable", "reason": reason}


@contextmanager
def _alone_in(state: Path) -> Iterator[None]:
    """Hold the run's lock: two workflows at once must not write the same state.

    The kernel frees the lock with the process that holds it, so a crash leaves none behind.
    """
    with open(state / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another process trains in {state}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
