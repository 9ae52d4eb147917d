"""What a training says as it goes: each optimizer step checked, counted, written and shown."""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import psutil

from workflow_scripts.lib import live, measure
from workflow_scripts.lib.batches import Batch
from workflow_scripts.lib.checkpoints import Tensors
from workflow_scripts.lib.joblog import say

SECONDS_BETWEEN_LINES = 5.0


class DivergedError(ArithmeticError):
    """A loss or gradient was not finite; raised before the adapters were updated with it."""


@dataclass
class Recorder:
    """Takes in each optimizer step as it happens: file, progress, and the figures of the end.

    A training that goes on where another was cut off begins with that one's `steps`; `shapes` are
    those of this process, `all_shapes` of both. Engines call `raise_if_stopped` before each
    micro-batch, and set `snapshot` to the function that reads their state for a checkpoint.
    """

    file: IO[str]
    flops: Callable[[Batch], float] = lambda batch: 0.0  # arithmetic of one micro-batch
    steps: list[measure.Step] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    all_shapes: set[tuple[int, ...]] = field(default_factory=set)
    show: Callable[[measure.Step], None] = lambda step: None
    raise_if_stopped: Callable[[], None] = lambda: None
    snapshot: Callable[[], Tensors] | None = None
    after_step: Callable[[], None] = lambda: None

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
        self.all_shapes |= shapes
        self.steps.append(step)
        measure.write_step(self.file, step)
        self.show(step)
        self.after_step()


@contextmanager
def progress(total: int):
    """Yield a function that says a step in one line: the first, the last, and every few seconds."""
    said = 0.0
    recent: deque[measure.Step] = deque(maxlen=live.RECENT_STEPS)

    def show(step: measure.Step) -> None:
        nonlocal said
        recent.append(step)
        now = time.monotonic()
        if now - said < SECONDS_BETWEEN_LINES and step.step not in (1, total):
            return
        said = now
        settled = [each for each in recent if not each.new_shape] or recent
        pace = live.pace_of([(each.tokens, each.seconds) for each in settled])
        line = live.step_line(
            os.environ.get(live.PLACE, ""),
            step.step,
            total,
            step.loss,
            pace.tokens_per_s if pace else 0.0,
            psutil.Process().memory_info().rss,
            step.device_bytes,
            pace.step_seconds * (total - step.step) if pace else 0.0,
        )
        say(line)

    yield show
