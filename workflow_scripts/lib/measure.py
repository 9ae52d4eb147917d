"""What a training measures: times of steps, rates out of them, tokens, versions, fingerprints."""

import hashlib
import json
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from workflow_scripts.lib.jsonl import atomic_writer


class Step(NamedTuple):
    """One optimizer step as `steps.jsonl` has it."""

    step: int  # 1-based
    loss: float
    token_accuracy: float
    learning_rate: float
    grad_norm: float | None  # before clipping; None where the step was skipped
    seconds: float
    tokens: int
    supervised_tokens: int
    padded_tokens: int
    device_bytes: int | None
    new_shape: bool = False  # the process saw a shape for the first time, and compiled
    flops: float = 0.0  # arithmetic of the step


class StepClock:
    """Seconds of one optimizer step, from fetching its rows to the device having updated.

    `synchronize` waits for the device, which both ends need: engines return before it is done.
    """

    def __init__(self, synchronize=lambda: None):
        self.synchronize = synchronize
        self.started: float | None = None

    def start(self) -> None:
        """Begin a step; the device has nothing left to do from the one before."""
        self.started = time.perf_counter()

    def stop(self) -> float:
        """End the step and return its seconds."""
        if self.started is None:
            raise RuntimeError("StepClock.stop without start")
        self.synchronize()
        seconds, self.started = time.perf_counter() - self.started, None
        return seconds


def summarize_steps(steps: Sequence[Step], micro_batches: int, sequences: int) -> dict:
    """Return times and rates of a training, all from the same step times.

    `micro_batches` and `sequences` are those of one optimizer step. Rates, p50 and p95 leave out
    each step in which a shape came for the first time (null when none is left): engines compile
    there. `compile_seconds` is what those steps took above the median of the others;
    `train_seconds` and the trained tokens count every step. `flops_per_token` is FLOP per computed
    token, padding included, over the steps that the rates are from.
    """
    settled = [step for step in steps if not step.new_shape]
    seconds = sum(step.seconds for step in settled)

    def per_second(amount: float) -> float | None:
        return amount / seconds if settled and seconds > 0 else None

    median, high = (
        (float(q) for q in np.quantile([step.seconds for step in settled], [0.5, 0.95]))
        if settled
        else (None, None)
    )
    first = [step.seconds for step in steps if step.new_shape]
    padded = sum(step.padded_tokens for step in settled)
    return {
        "optimizer_steps": len(steps),
        "train_seconds": sum(step.seconds for step in steps),
        "compile_seconds": sum(max(s - median, 0.0) for s in first) if settled else None,
        "step_seconds_p50": median,
        "step_seconds_p95": high,
        "optimizer_steps_per_s": per_second(len(settled)),
        "micro_batches_per_s": per_second(len(settled) * micro_batches),
        "sequences_per_s": per_second(len(settled) * sequences),
        "tokens_per_s": per_second(sum(step.tokens for step in settled)),
        "supervised_tokens_per_s": per_second(sum(step.supervised_tokens for step in settled)),
        "padded_tokens_per_s": per_second(padded),
        "flops_per_token": sum(step.flops for step in settled) / padded if padded else None,
        "trained_tokens": sum(step.tokens for step in steps),
        "trained_supervised_tokens": sum(step.supervised_tokens for step in steps),
    }


@contextmanager
def steps_file(path: str | Path, kept: Sequence[Step] = ()) -> Iterator[IO[str]]:
    """Open `steps.jsonl` with the steps to keep and no others, line-buffered: what was written
    survives a kill of the process.
    """
    with atomic_writer(path) as file:
        for step in kept:
            write_step(file, step)
    with open(path, "a", encoding="utf-8", newline="\n", buffering=1) as file:
        yield file


def write_step(file: IO[str], step: Step) -> None:
    """Append one step as one line."""
    file.write(json.dumps(step._asdict(), separators=(",", ":"), allow_nan=False) + "\n")


def read_steps(path: str | Path) -> list[Step]:
    """Return the steps of a file up to the first line that is not the next one: a crash may have
    torn the last. No file has no steps.
    """
    steps: list[Step] = []
    with suppress(OSError, ValueError, TypeError), open(path, encoding="utf-8") as file:
        for line in file:
            step = Step(**json.loads(line))
            if step.step != len(steps) + 1:
                break
            steps.append(step)
    return steps


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def sha256_of(paths: Iterable[str | Path]) -> str:
    """Return one SHA-256 over the contents of files in the given order, names left out."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def model_sha256(folder: str | Path) -> str:
    """Return the fingerprint of a model folder: its config.json and weights."""
    folder = Path(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder}: no *.safetensors, expected a Hugging Face model folder")
    return sha256_of([folder / "config.json", *weights])


def fingerprints(
    model_folder: str | Path,
    initial_adapter: str | Path,
    train_file: str | Path,
    val_file: str | Path,
) -> dict[str, str]:
    """Return what tells a run's inputs from others, as the fields of its row."""
    return {
        "examples_sha256": sha256_of([train_file, val_file]),
        "model_sha256": model_sha256(model_folder),
        "initial_adapter_sha256": sha256_of([initial_adapter]),
    }


class Memory(NamedTuple):
    """Bytes on the device: now, most in use so far, most reserved so far; None where unknown."""

    used: int | None = None
    peak: int | None = None
    reserved: int | None = None


def mlx_memory() -> Memory:
    """Return MLX's counters. Its peak leaves the buffer cache out, so that is added to reserved."""
    import mlx.core as mx

    peak = mx.get_peak_memory()
    return Memory(mx.get_active_memory(), peak, max(peak, _active_and_cache(mx)))


def _active_and_cache(mx) -> int:
    return mx.get_active_memory() + mx.get_cache_memory()


class TorchMemory:
    """PyTorch's counters on one device; sampled on MPS, which keeps no peak; nothing on the CPU,
    where the footprint of the process says it.
    """

    def __init__(self, device: str):
        self.device = device
        self.peak = self.reserved = 0

    def sample(self) -> Memory:
        """Take a sample; call it after a backward pass, where most is in use."""
        import torch

        if self.device == "cuda":
            return Memory(
                torch.cuda.memory_allocated(),
                torch.cuda.max_memory_allocated(),
                torch.cuda.max_memory_reserved(),
            )
        if self.device == "mps":
            used = torch.mps.current_allocated_memory()
            self.peak = max(self.peak, used)
            self.reserved = max(self.reserved, torch.mps.driver_allocated_memory())
            return Memory(used, self.peak, self.reserved)
        return Memory()

    def restart(self) -> None:
        """Forget the peaks so far, such as that of loading."""
        import torch

        self.peak = self.reserved = 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
