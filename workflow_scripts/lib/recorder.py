"""What a training says as it goes: each optimizer step checked, counted, written and shown."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from workflow_scripts.lib import measure
from workflow_scripts.lib.batches import Batch
from workflow_scripts.lib.joblog import say

SECONDS_BETWEEN_LINES = 5.0


class DivergedError(ArithmeticError):
    """A loss or gradient was not finite; raised before the adapters were updated with it."""


@dataclass
class Recorder:
    """Takes in each optimizer step as it happens: file, progress, and the figures of the end."""

    file: IO[str]
    flops: Callable[[Batch], float] = lambda batch: 0.0  # arithmetic of one micro-batch
    steps: list[measure.Step] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    show: Callable[[measure.Step], None] = lambda step: None

    def check(self, loss: float, grad_norm: float) -> None:
        """Raise DivergedError unless both are finite; engines call it before they update."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {len(self.steps) + 1}: loss {loss}, gradient norm {grad_norm}; not finite, "
                "the adapter is that of the step before. Try a lower learning_rate or another dtype"
            )

    def record(
        self,
        loss: float,
        correct: float,
        learning_rate: float,
        grad_norm: float | None,
        seconds: float,
        micro_batches: list[Batch],
        device_bytes: int | None,
    ) -> None:
        """Note one finished optimizer step; `loss` is the mean over its supervised tokens, and a
        `grad_norm` of None says that its gradient overflowed and nothing was updated.
        """
        shapes = {batch.shape for batch in micro_batches}
        supervised = sum(batch.supervised for batch in micro_batches)
        step = measure.Step(
            step=len(self.steps) + 1,
            loss=loss,
            token_accuracy=correct / supervised,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens=sum(batch.tokens for batch in micro_batches),
            supervised_tokens=supervised,
            padded_tokens=sum(batch.padded for batch in micro_batches),
            device_bytes=device_bytes,
            new_shape=not shapes <= self.shapes,
            flops=sum(map(self.flops, micro_batches)),
        )
        self.shapes |= shapes
        self.steps.append(step)
        measure.write_step(self.file, step)
        self.show(step)


@contextmanager
def progress(total: int):
    """Yield a function that shows a step: a bar on a terminal, else a line every few seconds."""
    started = last = time.monotonic()

    def text(step: measure.Step) -> str:
        memory = f", {step.device_bytes / 1e6:,.0f} MB on the device" if step.device_bytes else ""
        return f"loss {step.loss:.4f}, {step.tokens / step.seconds:,.0f} tokens/s{memory}"

    def line(step: measure.Step) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES or step.step in (1, total):
            last = now
            remaining = (now - started) / step.step * (total - step.step)
            say(f"step {step.step} of {total}: {text(step)}, {remaining:.0f} s remaining")

    if not sys.stdout.isatty():
        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.completed} of {task.total}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=total)
        yield lambda step: bar.update(task, completed=step.step, description=text(step))
