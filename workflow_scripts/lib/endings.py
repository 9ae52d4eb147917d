"""How a training child ended, in the words of a row: from exit code, last lines and evidence.

A run that ran out of memory, was stopped at a limit or aborted inside its engine is a result. One
that was ended from outside is none: the job fails and a rerun goes on from the last checkpoint. Any
other exception is a bug.
"""

import re
import signal
from collections.abc import Iterable
from typing import NamedTuple

from workflow_scripts.lib.limits import Stop
from workflow_scripts.lib.live import size

STOPPED = 75  # EX_TEMPFAIL, of a child that was told to stop: nothing is lost, a rerun goes on

# What engines say when they run out of memory, on any device.
OUT_OF_MEMORY = re.compile(
    "|".join(
        [
            r"MPS backend out of memory",  # torch, MPS
            r"CUDA out of memory",  # torch, CUDA
            r"torch\.(cuda\.)?OutOfMemoryError",
            r"(CUDA|CUBLAS|CUDNN)\w* error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)",
            r"CUDNN_STATUS_ALLOC_FAILED",
            r"\bcu\w+(\(.*\))? failed: (CUDA_ERROR_OUT_OF_MEMORY|out of memory)",  # MLX, CUDA
            r"kIOGPUCommandBufferCallbackErrorOutOfMemory",  # torch and MLX, Metal
            r"\[METAL\] Command buffer execution failed: Insufficient Memory",
            r"\[metal::malloc\] (Attempting to allocate|Resource limit)",
            r"\[malloc(_or_wait)?\] Unable to allocate",  # MLX
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",  # torch, CPU
            r"^MemoryError\b",
            r"\b_ArrayMemoryError: Unable to allocate",
            r"std::bad_alloc",
            r"\[Errno 12\] Cannot allocate memory",
        ]
    )
)
# Metal ends commands that take too long or hold up the screen.
METAL_WATCHDOG = re.compile(
    r"kIOGPUCommandBufferCallbackError(Timeout|ImpactingInteractivity|Hang|SubmissionsIgnored)"
    r"|Caused GPU (Timeout|Hang) Error"
)
# Torch on Metal only prints these, and goes on with what lies in its buffers.
SURVIVED_FAILURE = re.compile(r"kIOGPUCommandBufferCallbackError\w+")
ABORTS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
EXHAUSTED_SHARE = 1 / 16  # of memory, still available at the end: 1 GB of 16


class Evidence(NamedTuple):
    """What the meters say of a child's last seconds."""

    oom_kills: int | None  # by the kernel since the child started; None where nobody counts
    available_bytes: int  # least of the last samples
    total_bytes: int
    process_bytes: int  # peak of the process tree


class BugError(RuntimeError):
    """A child failed by an exception that is no result."""


class InterruptedRunError(RuntimeError):
    """A child was ended from outside; a rerun goes on where it was."""


def name_ending(
    exit_code: int, last_lines: Iterable[str], stop: Stop | None, evidence: Evidence
) -> Stop | None:
    """Return the status of a row and why; None for a child that ended well (exit code 0).

    `stop` is why the guard ended the child, if it did. Raises InterruptedRunError for an end from
    outside, BugError for any other failure, with the end of the log.
    """
    lines = list(last_lines)
    if stop and stop.status:
        return stop
    if exit_code == 0:
        return None
    if stop:
        raise InterruptedRunError(stop.reason)
    code = _signal_name(exit_code)
    if line := _last_match(OUT_OF_MEMORY, lines):
        return Stop("oom", _sentence(line))
    if line := _last_match(METAL_WATCHDOG, lines):
        return Stop("crashed", f"Metal ended a command that took too long: {_sentence(line)}")
    if code == "SIGKILL":
        if found := _signs_of_exhaustion(evidence):
            return Stop("oom", f"killed (SIGKILL), and {found}")
        raise InterruptedRunError(
            "the training was killed (SIGKILL) by somebody, without any sign that memory ran out "
            f"({size(evidence.available_bytes)} of {size(evidence.total_bytes)} were available)"
        )
    if code in ABORTS:
        said = next((line for line in reversed(lines) if line.strip()), "")
        return Stop("crashed", f"the engine ended itself ({code}): {_sentence(said)}".rstrip(": "))
    if exit_code == STOPPED or code:
        raise InterruptedRunError(f"the training was ended from outside ({code or 'SIGTERM'})")
    raise BugError(f"it ended with exit code {exit_code}; the end of its log:\n{quoted(lines)}")


def survived_failure(line: str) -> bool:
    """Say whether a line tells that a device gave up on a command whose caller went on."""
    return SURVIVED_FAILURE.search(line) is not None


def failure_stop(line: str) -> Stop:
    """Return the stop for a child that said so."""
    if OUT_OF_MEMORY.search(line):
        return Stop("oom", _sentence(line))
    return Stop("crashed", f"Metal ended a command: {_sentence(line)}")


def smaller(settings: dict) -> str:
    """Return what to change in a run's settings so that it takes less memory, the least first."""
    micro_batch, context = settings["micro_batch"], settings["context"]
    tries = []
    if micro_batch > 1:
        divisors = [n for n in range(1, micro_batch) if settings["effective_batch"] % n == 0]
        tries.append(f"micro_batch {divisors[-1]} (was {micro_batch})")
    if not settings["gradient_checkpointing"]:
        tries.append("gradient_checkpointing: true")
    tries.append(f"context {max(context // 2, 64)} (was {context})")
    return "try " + ", or ".join(tries)


def quoted(lines: Iterable[str]) -> str:
    """Return lines of a log as they are shown below a message."""
    return "\n".join(f"  | {line}" for line in lines)


def _signs_of_exhaustion(evidence: Evidence) -> str | None:
    if evidence.oom_kills:
        return (
            f"the kernel counted {evidence.oom_kills} kill(s) for want of memory; the process had "
            f"taken {size(evidence.process_bytes)}"
        )
    if evidence.available_bytes < EXHAUSTED_SHARE * evidence.total_bytes:
        return (
            f"only {size(evidence.available_bytes)} of {size(evidence.total_bytes)} were still "
            f"available; the process had taken {size(evidence.process_bytes)}"
        )
    return None


def _signal_name(exit_code: int) -> str | None:
    """The signal that ended a process: Python's negative codes, or a shell's 128 + number."""
    try:
        return signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name
    except ValueError:
        return None


def _last_match(pattern: re.Pattern, lines: list[str]) -> str | None:
    return next((line for line in reversed(lines) if pattern.search(line)), None)


def _sentence(line: str, length: int = 300) -> str:
    line = " ".join(line.split())
    return line if len(line) <= length else line[: length - 1] + "…"
