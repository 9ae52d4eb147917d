"""Limits of a training: when the guard stops it, and how the row then says so."""

from collections import deque
from typing import NamedTuple

from workflow_scripts.lib.live import size

MIN_FREE_DISK_BYTES = 1_000_000_000  # a checkpoint of the largest model here takes a third of it
STILL_GROWING_SHARE = 0.01  # of the swap limit, over a window: less is the noise of a machine


class Limits(NamedTuple):
    """When to stop; None where there is no limit."""

    process_bytes: int | None = None  # footprint of the process tree
    swap_growth_bytes: int | None = None  # used swap above that at the start
    swap_window_seconds: float = 0.0  # for how long it must have kept growing above that
    seconds: float | None = None  # wall time since this start
    free_disk_bytes: int | None = MIN_FREE_DISK_BYTES


NO_LIMITS = Limits()


class Stop(NamedTuple):
    """Why the guard ends a child: a status of a row, or None for an end from outside."""

    status: str | None
    reason: str


class Watch:
    """Compares samples with limits, one after the other."""

    def __init__(self, limits: Limits, swap_before: int) -> None:
        self.limits = limits
        self.swap_before = swap_before
        self.above: deque[tuple[float, int]] = deque()  # (seconds, swap growth) above the limit

    def check(
        self, seconds: float, process_bytes: int, swap_used_bytes: int, free_disk_bytes: int
    ) -> Stop | None:
        """Return why to stop now, or None; `seconds` are those since this start."""
        limits = self.limits
        if limits.process_bytes is not None and process_bytes > limits.process_bytes:
            return Stop(
                "oom",
                f"the process took {size(process_bytes)}, above memory.limit_bytes of "
                f"{size(limits.process_bytes)}",
            )
        if growth := self._keeps_swapping(seconds, swap_used_bytes - self.swap_before):
            return Stop(
                "swap",
                f"used swap grew by {size(growth)}, above memory.swap_growth_bytes of "
                f"{size(limits.swap_growth_bytes)}, and kept growing for "
                f"{limits.swap_window_seconds:g} s",
            )
        if limits.seconds is not None and seconds > limits.seconds:
            return Stop(
                "timeout", f"{seconds:.0f} s, above training.timeout_seconds of {limits.seconds:g}"
            )
        if limits.free_disk_bytes is not None and free_disk_bytes < limits.free_disk_bytes:
            return Stop(
                None,
                f"only {size(free_disk_bytes)} of disk are free, below "
                f"{size(limits.free_disk_bytes)}: make room and run again",
            )
        return None

    def _keeps_swapping(self, seconds: float, growth: int) -> int:
        """Bytes of growth when it is above the limit and kept growing for the window, else 0."""
        limit, window = self.limits.swap_growth_bytes, self.limits.swap_window_seconds
        if limit is None or growth <= limit:
            self.above.clear()
            return 0
        self.above.append((seconds, growth))
        while len(self.above) > 1 and self.above[1][0] <= seconds - window:
            self.above.popleft()
        since, before = self.above[0]
        grew = growth - before > STILL_GROWING_SHARE * limit if window else True
        return growth if seconds - since >= window and grew else 0
