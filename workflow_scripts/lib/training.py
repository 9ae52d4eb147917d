"""The frame around one training that both engines share: settings, rows, evaluation, result.

An engine is a handful of functions (`Engine`); everything that decides what is trained, on which
rows, in which order and how it is counted lies here and in `batches` and `recipe`.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workflow_scripts.lib import batches, flops, guard, measure, precision, recipe
from workflow_scripts.lib.batches import Batch, Plan
from workflow_scripts.lib.joblog import say
from workflow_scripts.lib.jsonl import read_json, write_json
from workflow_scripts.lib.recorder import DivergedError, Recorder, progress

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
    train: Callable[[Plan, Recorder], None]
    save: Callable[[Path], None]
    memory: Callable[[], measure.Memory]


def main(load: Callable[[dict, dict], Engine]) -> None:
    """Run the trainer whose engine `load(settings, model_config)` makes, on the JSON file named on
    the command line.
    """
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python -m workflow_scripts.lib.{Path(sys.argv[0]).stem} FILE")
    if os.environ.get("FINETUNE_PARENT") == "1":
        guard.end_with_parent()
    # Nothing here may reach for the network or report to it, whoever starts it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin while they wait made a step of 0.04 s take 3 s beside another process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    result = run(read_json(sys.argv[1]), load)
    say(f"{result['status']}" + (f": {result['reason']}" if result["reason"] else ""))


def run(settings: dict, load: Callable[[dict, dict], Engine]) -> dict:
    """Train as the settings say and return what `result.json` in the state folder then holds.

    Writes `steps.jsonl` as it goes and `adapter/` before the result. A run that diverges or whose
    device isn't here is a result; any other error goes on to the caller and leaves none.
    """
    state = Path(settings["state_folder"])
    state.mkdir(parents=True, exist_ok=True)
    (state / "result.json").unlink(missing_ok=True)
    try:
        result = _train(settings, state, load)
    except precision.UnavailableError as error:
        result = {"status": "unavailable", "reason": str(error)}
    write_json(state / "result.json", result)
    return result


def _train(settings: dict, state: Path, load: Callable[[dict, dict], Engine]) -> dict:
    check_tokenizer(settings["train_file"], settings["model_folder"])
    context, chunk = settings["context"], settings["head_chunk"]
    micro_batch, effective = settings["micro_batch"], settings["effective_batch"]
    accumulation = recipe.accumulation(effective, micro_batch)
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
    plan = Plan(
        batches.row_order(
            train_rows.lengths,
            settings["optimizer_steps"],
            effective,
            micro_batch,
            settings["seed"],
        ),
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

    def evaluate(when: str) -> dict:
        return evaluate_rows(
            engine, batches.evaluation_batches(val_rows, context, chunk, micro_batch, pad), when
        )

    before = after = NOT_EVALUATED
    reason = None
    with measure.steps_file(state / "steps.jsonl") as file:
        recorder = Recorder(
            file,
            flops=flops.counter(config, settings["lora"]["r"], settings["gradient_checkpointing"]),
        )
        try:
            before = evaluate("before")
            with progress(settings["optimizer_steps"]) as recorder.show:
                engine.train(plan, recorder)
            after = evaluate("after")
        except DivergedError as error:
            reason = str(error)
    skipped = sum(step.grad_norm is None for step in recorder.steps)
    if reason is None and skipped == len(recorder.steps):
        reason = f"no optimizer step of {skipped} was applied: every gradient overflowed"
    _save_whole(engine.save, state / "adapter")
    memory = engine.memory()
    rates = measure.summarize_steps(recorder.steps, accumulation, effective)
    train_file, val_file = settings["train_file"], settings["val_file"]
    return {
        "status": "ok" if reason is None else "diverged",
        "reason": reason,
        "last_step": len(recorder.steps),
        "device": engine.device,
        "dtype": engine.dtype,
        **rates,
        "matmul_peak_flops": engine.matmul_peak_flops,
        "utilization": flops.utilization(
            rates["flops_per_token"], rates["padded_tokens_per_s"], engine.matmul_peak_flops
        ),
        "skipped_steps": skipped,
        "distinct_shapes": len(recorder.shapes),
        "evaluation_seconds": before["seconds"] + after["seconds"],
        "load_peak_bytes": engine.load_peak_bytes,
        "peak_device_bytes": memory.peak,
        "peak_reserved_bytes": memory.reserved,
        "val_loss_before": before["loss"],
        "val_loss": after["loss"],
        "val_token_accuracy_before": before["accuracy"],
        "val_token_accuracy": after["accuracy"],
        "val_rows": len(val_rows),
        "val_tokens": before["tokens"],
        "trainable_parameters": engine.trainable_parameters,
        "total_parameters": engine.total_parameters,
        "gradient_checkpointing": settings["gradient_checkpointing"],
        "loader": engine.loader,
        "versions": measure.versions(engine.packages),
        "examples_sha256": measure.sha256_of([train_file, val_file]),
        "model_sha256": measure.model_sha256(settings["model_folder"]),
        "initial_adapter_sha256": measure.sha256_of([settings["initial_adapter"]]),
    }


def evaluate_rows(engine: Engine, rows: Iterable[Batch], when: str) -> dict:
    """Return loss, accuracy (both over all supervised tokens), their number, and the seconds.

    Raises DivergedError for a loss that is not finite: float16 can overflow in a forward pass.
    """
    rows = list(rows)
    tokens = sum(batch.supervised for batch in rows)
    started = time.perf_counter()
    loss, correct = engine.evaluate(rows)
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
