"""A parent around each training child: its environment, its log, its memory, its end.

Python catches neither a Metal abort nor the kernel's killer, so a training lives in a child process
and its parent says how it ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from workflow_scripts.lib import live

PARENT_GONE = 75  # EX_TEMPFAIL: nothing is lost, a rerun goes on
PARENT_WATCHED = "FINETUNE_PARENT"
SECONDS_BETWEEN_SAMPLES = 1.0
LINES_KEPT = 25
CONTROL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Ending(NamedTuple):
    """How a child ended: its exit code (negative: a signal), the last lines it said, its peak."""

    exit_code: int
    last_lines: list[str]
    peak_process_bytes: int
    swap_growth_bytes: int
    wall_seconds: float


def child_environment(environment: dict[str, str], threads: int) -> dict[str, str]:
    """The environment of a training child, complete before it imports torch or mlx.

    Snakemake sets the thread counts to the job's threads, 1 under `--cores 1`; a training has the
    machine to itself and takes all cores. Models are local by now, so the hub is off.
    """
    return {
        **environment,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve whatever else runs, and each other
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ENABLE_MPS_FALLBACK": "0",  # silent CPU fallbacks would falsify speeds
        "TOKENIZERS_PARALLELISM": "false",
        PARENT_WATCHED: "1",
    }


def run_child(
    command: list[str],
    environment: dict[str, str],
    log_file: str | Path,
    memory_file: str | Path,
    live_line: Callable[[int], str] | None = None,
) -> Ending:
    """Run a training child to its end: its output into the log, memory samples into a file.

    What goes into the log is also shown on our own stderr. If that is a terminal, `live_line`,
    given a number of columns, says in one line how far the training is; it stays below the others.

    The child gets a pipe as standard input that nobody writes to: when this process dies, it sees
    the end of file and stops. When Snakemake dies (even by SIGKILL), this process ends the child.

    Raises SystemExit when Snakemake is gone, KeyboardInterrupt on Ctrl-C; the child's whole process
    group is dead by then.
    """
    started = time.monotonic()
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone; one kill ends the whole tree
    )
    lines: deque[str] = deque(maxlen=LINES_KEPT)
    echo = LiveEcho(live_line) if live_line and _on_terminal() else Echo()
    copying = (child, log_file, lines, echo)
    reader = threading.Thread(target=_copy_lines, args=copying, daemon=True)
    reader.start()
    orchestrators = _orchestrators()
    samples = MemorySamples(child.pid)
    try:
        with echo, open(memory_file, "w", encoding="utf-8") as file:
            while child.poll() is None:
                file.write(json.dumps(samples.take(time.monotonic() - started)) + "\n")
                file.flush()
                if any(map(_is_dead, orchestrators)):
                    raise SystemExit("Snakemake is gone; the training was stopped")
                try:
                    child.wait(SECONDS_BETWEEN_SAMPLES)
                except subprocess.TimeoutExpired:
                    echo.refresh()
    finally:
        _end_group(child)
    reader.join(timeout=5)
    return Ending(
        child.returncode,
        list(lines),
        samples.peak_process_bytes,
        samples.swap_growth_bytes,
        time.monotonic() - started,
    )


class MemorySamples:
    """Memory of a child's process tree and of the machine, one sample at a time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.swap_before = psutil.swap_memory().used
        self.peak_process_bytes = 0
        self.swap_growth_bytes = 0

    def take(self, seconds: float) -> dict:
        """One sample: resident bytes of the tree, now and at most so far, what the machine has
        left, used swap.
        """
        process_bytes = _tree_bytes(self.pid)
        swap_bytes = psutil.swap_memory().used
        self.peak_process_bytes = max(self.peak_process_bytes, process_bytes)
        self.swap_growth_bytes = max(self.swap_growth_bytes, swap_bytes - self.swap_before)
        return {
            "seconds": round(seconds, 3),
            "process_bytes": process_bytes,
            "peak_process_bytes": self.peak_process_bytes,
            "available_bytes": psutil.virtual_memory().available,
            "swap_used_bytes": swap_bytes,
        }


def end_with_parent() -> None:
    """In the child: exit as soon as the parent is gone, so that no orphan trains on beside a rerun.

    Does nothing for a trainer that a person started, whose standard input is not ours.
    """
    if os.environ.get(PARENT_WATCHED) != "1":
        return

    def wait_for_end_of_file() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would stall the interpreter's end
            pass
        os._exit(PARENT_GONE)

    threading.Thread(target=wait_for_end_of_file, daemon=True, name="parent-watch").start()


class Echo:
    """What a person sees of a child: the lines that it says, on our own stderr."""

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        """Show one line of the child's."""
        print(line, file=sys.__stderr__, flush=True)

    def refresh(self) -> None:
        """Show what has changed since the last call."""


class LiveEcho(Echo):
    """On a terminal: a live line instead of the child's lines on single steps, below the others.

    A terminal may go away while the training goes on, so that it cannot be written is no error.
    """

    def __init__(self, line: Callable[[int], str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self.line = line
        self.console = Console(file=sys.__stderr__)
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # it is the job's log
            redirect_stderr=False,
        )

    def __enter__(self) -> "LiveEcho":
        with suppress(OSError):
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.live.stop()

    def say(self, line: str) -> None:
        if not live.is_step_line(line):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        from rich.text import Text

        with suppress(OSError):
            line = Text(self.line(self.console.width), no_wrap=True, overflow="ellipsis")
            self.live.update(line, refresh=True)


def _on_terminal() -> bool:
    terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
    return terminal and os.environ.get("TERM") not in (None, "dumb", "unknown")


def _copy_lines(
    child: subprocess.Popen, log_file: str | Path, lines: deque[str], echo: Echo
) -> None:
    """Copy what the child says to the log and to who watches, as plain lines."""
    with open(log_file, "a", encoding="utf-8", buffering=1) as log:
        for raw in child.stdout:
            line = _plain(raw.decode("utf-8", errors="replace"))
            lines.append(line)
            log.write(line + "\n")
            with suppress(OSError):
                echo.say(line)


def _plain(line: str) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites, and codes, gone."""
    return CONTROL_CODES.sub("", line.rstrip().rpartition("\r")[2])


def _tree_bytes(pid: int) -> int:
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
    except psutil.Error:
        pass
    return total


def _orchestrators() -> list[psutil.Process]:
    """Our ancestors that are Snakemake; a shell or a terminal may go without ending the study."""
    return [each for each in psutil.Process().parents() if _is_snakemake(each)]


def _is_snakemake(process: psutil.Process) -> bool:
    try:
        return any("snakemake" in Path(part).name for part in process.cmdline()[:4])
    except psutil.Error:
        return False


def _is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _end_group(child: subprocess.Popen) -> None:
    """Kill what is left of the child's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
