"""The frame around one training that both engines share: settings, rows, evaluation, result.

An engine is a handful of functions (`Engine`); everything that decides what is trained, on which
rows, in which order and how it is counted lies here and in `batches` and `recipe`.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workflow_scripts.lib import batches, checkpoints, flops, measure, precision, recipe
from workflow_scripts.lib.batches import Batch, Plan
from workflow_scripts.lib.checkpoints import Tensors
from workflow_scripts.lib.endings import STOPPED
from workflow_scripts.lib.guard import DEVICE_FILE
from workflow_scripts.lib.joblog import say
from workflow_scripts.lib.jsonl import read_json, write_json
from workflow_scripts.lib.recorder import DivergedError, Recorder, progress
from workflow_scripts.lib.under_guard import StoppedError, StopRequest, obey, report_device

CHECKPOINTS = "checkpoints"  # in the state folder
NOT_EVALUATED = {"loss": None, "accuracy": None, "tokens": None, "seconds": 0.0}


class Engine(NamedTuple):
    """A loaded model with its adapters, and what can be done with it."""

    device: str
    dtype: str
    loader: str
    packages: tuple[str, ...]
    trainable_parameters: int
    total_parameters: int
    matmul_peak_flops: float  # measured on this device, in the type of the activations
    load_peak_bytes: int | None
    evaluate: Callable[[Iterable[Batch]], tuple[float, int]]  # summed loss, correct tokens
    train: Callable[[Plan, Recorder, Tensors | None], None]  # from a checkpoint, or from scratch
    save: Callable[[Path], None]
    memory: Callable[[], measure.Memory]


def main(load: Callable[[dict, dict], Engine]) -> None:
    """Run the trainer whose engine `load(settings, model_config)` makes, on the JSON file named on
    the command line.
    """
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python -m workflow_scripts.lib.{Path(sys.argv[0]).stem} FILE")
    request = StopRequest()
    obey(request)
    # Nothing here may reach for the network or report to it, whoever starts it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin while they wait made a step of 0.04 s take 3 s beside another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        result = run(read_json(sys.argv[1]), load, request)
    except StoppedError:
        raise SystemExit(STOPPED) from None
    say(f"{result['status']}" + (f": {result['reason']}" if result["reason"] else ""))


def run(
    settings: dict, load: Callable[[dict, dict], Engine], request: StopRequest | None = None
) -> dict:
    """Train as the settings say and return what `result.json` in the state folder then holds.

    Writes `steps.jsonl` as it goes, `figures.json` with what is known so far, and `adapter/` before
    the result. `settings["resume"]` is the folder of a checkpoint to go on from, or None. A run
    that diverges or whose device isn't here is a result; any other error goes on to the caller and
    leaves none. Raises StoppedError, after a checkpoint, when `request` was made.
    """
    state = Path(settings["state_folder"])
    state.mkdir(parents=True, exist_ok=True)
    (state / "result.json").unlink(missing_ok=True)
    try:
        result = _train(settings, state, load, request or StopRequest())
    except precision.UnavailableError as error:
        result = {"status": "unavailable", "reason": str(error)}
    write_json(state / "result.json", result)
    return result


def _train(
    settings: dict, state: Path, load: Callable[[dict, dict], Engine], request: StopRequest
) -> dict:
    check_tokenizer(settings["train_file"], settings["model_folder"])
    context, chunk = settings["context"], settings["head_chunk"]
    micro_batch, total = settings["micro_batch"], settings["optimizer_steps"]
    train_rows = batches.read_examples(settings["train_file"], context)
    val_rows = batches.read_examples(settings["val_file"], context)
    config = read_json(Path(settings["model_folder"]) / "config.json")
    positions = config.get("max_position_embeddings")
    if positions and context > positions:
        raise ValueError(
            f"context {context} is above the {positions} positions that {settings['model_folder']} "
            "was made for; take a smaller context"
        )
    pad = config.get("pad_token_id") or 0
    start = Start.read(settings["resume"], state / "steps.jsonl")
    order = batches.row_order(
        train_rows.lengths, total, settings["effective_batch"], micro_batch, settings["seed"]
    )
    plan = Plan(
        order[len(start.steps) :],
        lambda rows: batches.make_batch(train_rows, list(rows), context, chunk, pad),
    )
    say(f"{len(train_rows)} rows to train on, {len(val_rows)} to validate; loading the model")
    started = time.perf_counter()
    engine = load(settings, config)
    say(
        f"{engine.trainable_parameters:,} of {engine.total_parameters:,} parameters are trained, "
        f"{engine.dtype} on {engine.device}; ready in {time.perf_counter() - started:.1f} s; "
        f"matrix products reach {engine.matmul_peak_flops / 1e12:.3g} TFLOP/s"
    )
    report_device(state / DEVICE_FILE, engine.memory)
    figures = {
        **_about(engine, settings),
        "resumed": start.resumed,
        "val_rows": len(val_rows),
        "load_peak_bytes": _greatest(engine.load_peak_bytes, start.figures.get("load_peak_bytes")),
    }
    write_json(state / "figures.json", figures)

    def evaluate(when: str) -> dict:
        rows = batches.evaluation_batches(val_rows, context, chunk, micro_batch, pad)
        return evaluate_rows(engine, rows, when, request.raise_if_made)

    def add_peaks() -> None:
        now = engine.memory()
        for key, value in (("peak_device_bytes", now.peak), ("peak_reserved_bytes", now.reserved)):
            figures[key] = _greatest(value, start.figures.get(key))

    before, after = start.before, NOT_EVALUATED
    reason = None
    with measure.steps_file(state / "steps.jsonl", start.steps) as file:
        recorder = Recorder(
            file,
            flops=flops.counter(config, settings["lora"]["r"], settings["gradient_checkpointing"]),
            steps=start.steps,
            all_shapes=start.shapes,
            raise_if_stopped=request.raise_if_made,
        )

        def save() -> None:
            add_peaks()
            known = {
                "figures": figures,
                "before": before,
                "shapes": sorted(recorder.all_shapes),
                "resumed": start.resumed,
            }
            os.fsync(file.fileno())  # a checkpoint needs the lines of its steps
            done, identity = len(recorder.steps), settings["identity"]
            checkpoints.write(state / CHECKPOINTS, done, identity, recorder.snapshot(), known)

        saving = Saving(save, settings["checkpoint_seconds"], len(start.steps))
        recorder.after_step = lambda: saving.after_step(len(recorder.steps), total)
        try:
            if before is None:
                before = evaluate("before")
            figures |= {
                "val_loss_before": before["loss"],
                "val_token_accuracy_before": before["accuracy"],
                "val_tokens": before["tokens"],
            }
            write_json(state / "figures.json", figures)
            request.deferred = True
            with progress(total) as recorder.show:
                engine.train(plan, recorder, start.tensors)
            after = evaluate("after")
        except DivergedError as error:
            reason = str(error)
        except StoppedError:
            saving.at_stop(len(recorder.steps))
            say(f"stopped after step {len(recorder.steps)} of {total}")
            raise
    before = before or NOT_EVALUATED
    skipped = sum(step.grad_norm is None for step in recorder.steps)
    if reason is None and skipped == len(recorder.steps):
        reason = f"no optimizer step of {skipped} was applied: every gradient overflowed"
    _save_whole(engine.save, state / "adapter")
    add_peaks()
    return {
        **figures,
        "status": "ok" if reason is None else "diverged",
        "reason": reason,
        **figures_of_steps(recorder.steps, settings, engine.matmul_peak_flops),
        "distinct_shapes": len(recorder.all_shapes),
        "evaluation_seconds": before["seconds"] + after["seconds"],
        "val_loss": after["loss"],
        "val_token_accuracy": after["accuracy"],
    }


def figures_of_steps(
    steps: Sequence[measure.Step], settings: dict, matmul_peak_flops: float | None
) -> dict:
    """Return what a row says of the steps of a run, whole or cut off."""
    effective = settings["effective_batch"]
    accumulation = recipe.accumulation(effective, settings["micro_batch"])
    rates = measure.summarize_steps(steps, accumulation, effective)
    return {
        "last_step": len(steps),
        "skipped_steps": sum(step.grad_norm is None for step in steps),
        **rates,
        "utilization": flops.utilization(
            rates["flops_per_token"], rates["padded_tokens_per_s"], matmul_peak_flops
        ),
    }


class Start(NamedTuple):
    """Where a training begins: at its first step, or after the last one of a checkpoint."""

    steps: list[measure.Step]
    tensors: checkpoints.Tensors | None = None
    shapes: set[tuple[int, ...]] = frozenset()
    before: dict | None = None  # validation before training
    figures: dict = {}  # noqa: RUF012, nobody writes into it
    resumed: int = 0  # how often it went on from a checkpoint

    @classmethod
    def read(cls, checkpoint: str | None, steps_file: Path) -> "Start":
        """Return the start from a checkpoint's folder, from scratch for None.

        Raises ValueError when the lines of its steps are gone.
        """
        if checkpoint is None:
            return cls([])
        progress = read_json(Path(checkpoint) / "progress.json")
        steps = measure.read_steps(steps_file)[: progress["step"]]
        if len(steps) < progress["step"]:
            raise ValueError(f"{steps_file}: {len(steps)} steps, the checkpoint has more")
        say(f"going on after step {len(steps)}")
        return cls(
            steps,
            checkpoints.read_tensors(checkpoint),
            set(map(tuple, progress["shapes"])),
            progress["before"],
            progress["figures"],
            progress["resumed"] + 1,
        )


class Saving:
    """When to write a checkpoint: every so many seconds at the end of a step, and after the last.

    Without seconds, never.
    """

    def __init__(self, save: Callable[[], None], seconds: float | None, saved_step: int) -> None:
        self.save, self.seconds, self.saved_step = save, seconds, saved_step
        self.saved_at = time.monotonic()

    def after_step(self, step: int, total: int) -> None:
        if self.seconds is None:
            return
        if step == total or time.monotonic() - self.saved_at >= self.seconds:
            self._save(step)

    def at_stop(self, step: int) -> None:
        """Save the steps since the last checkpoint, if there are any."""
        if self.seconds is not None and step > self.saved_step:
            self._save(step)

    def _save(self, step: int) -> None:
        self.save()
        self.saved_at, self.saved_step = time.monotonic(), step


def _about(engine: Engine, settings: dict) -> dict:
    return {
        "device": engine.device,
        "dtype": engine.dtype,
        "loader": engine.loader,
        "trainable_parameters": engine.trainable_parameters,
        "total_parameters": engine.total_parameters,
        "matmul_peak_flops": engine.matmul_peak_flops,
        "gradient_checkpointing": settings["gradient_checkpointing"],
        "versions": measure.versions(engine.packages),
        **settings["fingerprints"],
    }


def _greatest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def evaluate_rows(
    engine: Engine,
    rows: Iterable[Batch],
    when: str,
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> dict:
    """Return loss, accuracy (both over all supervised tokens), their number, and the seconds.

    Raises DivergedError for a loss that is not finite: float16 can overflow in a forward pass; and
    what `raise_if_stopped` raises, which is called before each batch.
    """
    rows = list(rows)

    def interruptible() -> Iterator[Batch]:
        for batch in rows:
            raise_if_stopped()
            yield batch

    tokens = sum(batch.supervised for batch in rows)
    started = time.perf_counter()
    loss, correct = engine.evaluate(interruptible())
    seconds = time.perf_counter() - started
    if not np.isfinite(loss):
        raise DivergedError(f"validation {when} training: loss {loss}; try another dtype or rate")
    say(f"validation {when}: loss {loss / tokens:.4f}, accuracy {correct / tokens:.1%}")
    return {
        "loss": loss / tokens,
        "accuracy": correct / tokens,
        "tokens": tokens,
        "seconds": seconds,
    }


def check_tokenizer(train_file: str | Path, model_folder: str | Path) -> None:
    """Raise ValueError when the examples were tokenized with another tokenizer than the model's."""
    stats, tokenizer = Path(train_file).parent / "stats.json", Path(model_folder) / "tokenizer.json"
    wanted = read_json(stats).get("tokenizer_sha256") if stats.is_file() else None
    if wanted is None or not tokenizer.is_file():
        return
    found = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{train_file}: made with the tokenizer {wanted[:12]}…, but {tokenizer} is "
            f"{found[:12]}…; tokenize the sessions with this model's tokenizer"
        )


def _save_whole(save: Callable[[Path], None], folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
