"""A parent around each training child: its environment, its limits, its memory, its end.

Python catches neither a Metal abort nor the kernel's killer, so a training lives in a child process
and its parent says how it ended.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from workflow_scripts.lib import endings, meters
from workflow_scripts.lib.child_output import OutputCopy, make_echo
from workflow_scripts.lib.limits import NO_LIMITS, Limits, Stop, Watch
from workflow_scripts.lib.live import last_objects, read_object

PARENT_WATCHED = "FINETUNE_PARENT"
SECONDS_BETWEEN_SAMPLES = 1.0
GRACE_SECONDS = 20.0  # from asking a child to stop until it is killed
DEVICE_FILE = "device.json"  # a child's own counters, beside its memory samples
HIGH_WATERMARK = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW_WATERMARK = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
TORCH_LOW_WATERMARK = 1.4  # torch's default, which refuses a high one below it
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Ending(NamedTuple):
    """How a child ended: its exit code (negative: a signal), the last lines it said, why the guard
    stopped it if it did, and what the meters say.
    """

    exit_code: int
    last_lines: list[str]
    stop: Stop | None
    evidence: endings.Evidence
    peak_process_bytes: int
    swap_growth_bytes: int
    wall_seconds: float


def child_environment(
    environment: dict[str, str],
    threads: int,
    mps_watermark: float | None = None,
    limited: bool = False,
) -> dict[str, str]:
    """The environment of a training child, complete before it imports torch or mlx.

    Snakemake sets the thread counts to the job's threads, 1 under `--cores 1`; a training has the
    machine to itself and takes all cores. Models are local by now, so the hub is off.

    `mps_watermark` is how many times the recommended memory torch may take on a Mac's GPU; without
    one, torch's own limits stay as they are. 0 takes them away, which freezes a Mac that runs out
    of memory: that needs a limit of the guard's own (`limited`). Raises ValueError for 0 without
    one; a 0 that the user's environment brings is left out then.
    """
    child = {
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
    if mps_watermark is not None:
        child[HIGH_WATERMARK] = str(float(mps_watermark))
        child.pop(LOW_WATERMARK, None)
        if 0 < mps_watermark < TORCH_LOW_WATERMARK:
            child[LOW_WATERMARK] = child[HIGH_WATERMARK]
    if not limited and _is_zero(child.get(HIGH_WATERMARK)):
        if mps_watermark is not None:
            raise ValueError("memory.mps_watermark: 0 needs memory.limit_bytes; set both")
        del child[HIGH_WATERMARK]
    return child


def run_child(
    command: list[str],
    environment: dict[str, str],
    log_file: str | Path,
    memory_file: str | Path,
    limits: Limits = NO_LIMITS,
    live_line: Callable[[int], str] | None = None,
    inherited: tuple[int, ...] = (),
) -> Ending:
    """Run a training child to its end: its output into the log, a memory sample a second into a
    file, which goes on where an earlier attempt of the same run left it.

    What goes into the log is also shown on our own stderr. If that is a terminal, `live_line`,
    given a number of columns, says in one line how far the training is; it stays below the others.

    The child inherits the descriptors `inherited` (of locks), and gets a pipe as standard input
    that nobody writes to: when this process dies, it sees the end of file and stops. At a limit,
    on Ctrl-C or SIGTERM, and when Snakemake dies (even by SIGKILL), this process asks the child to
    stop, and kills it if it does not in GRACE_SECONDS; its whole process tree is dead at the end.

    Raises SystemExit when Snakemake is gone or on SIGTERM, KeyboardInterrupt on Ctrl-C.
    """
    kills_before = meters.kernel_oom_kills()
    samples = Samples(memory_file)
    watch = Watch(limits, samples.swap_before)
    leave_with_snakemake = orphan_check()
    stop: Stop | None = None
    with _terminated_by_exception():
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone
            pass_fds=inherited,
        )
        tree = meters.ProcessTree(child.pid)
        try:
            meters.prefer_as_victim(child.pid)
            echo = make_echo(live_line)
            output = OutputCopy(child.stdout, log_file, echo, endings.survived_failure)
            with keep_awake(child.pid), echo, open(memory_file, "a", encoding="utf-8") as file:
                while child.poll() is None and stop is None:
                    sample = samples.take(tree)
                    with suppress(OSError):  # a full disk, which the watch sees too
                        file.write(json.dumps(sample) + "\n")
                        file.flush()
                    stop = _failure(output) or watch.check(
                        samples.seconds,
                        sample["process_bytes"],
                        sample["swap_used_bytes"],
                        shutil.disk_usage(Path(memory_file).parent).free,
                    )
                    leave_with_snakemake()
                    if stop is None:
                        echo.refresh()
                        _wait(child, SECONDS_BETWEEN_SAMPLES)
                if stop:
                    _ask_to_stop(child)
        except BaseException:
            _ask_to_stop(child)
            raise
        finally:
            _end_tree(child, tree)
    output.finish()
    kills = meters.kernel_oom_kills()
    return Ending(
        child.returncode,
        list(output.last_lines),
        _failure(output) or (stop if child.returncode != 0 else None),
        endings.Evidence(
            oom_kills=None if kills is None else kills - (kills_before or 0),
            available_bytes=samples.least_available_bytes,
            total_bytes=meters.total_bytes(),
            process_bytes=samples.peak_process_bytes,
        ),
        samples.peak_process_bytes,
        samples.swap_growth_bytes,
        samples.seconds_before + samples.seconds,
    )


class Samples:
    """Memory of a child's process tree and of the machine, and the child's own counters of its
    device, one sample at a time. Peaks and times go on from the last sample of an earlier attempt.
    """

    def __init__(self, memory_file: str | Path) -> None:
        earlier = next(reversed(last_objects(memory_file)), {})
        self.device_file = Path(memory_file).with_name(DEVICE_FILE)
        self.seconds_before = self.last_seconds = earlier.get("seconds", 0.0)
        self.peak_process_bytes = earlier.get("peak_process_bytes", 0)
        self.swap_growth_bytes = earlier.get("swap_growth_bytes", 0)
        self.swap_before = meters.swap_used_bytes()
        self.available: list[int] = []
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this attempt began."""
        return time.monotonic() - self._started

    @property
    def least_available_bytes(self) -> int:
        """What the machine could still give, at its least in the last samples."""
        return min(self.available, default=meters.total_bytes())

    def take(self, tree: meters.ProcessTree) -> dict:
        """One sample: bytes of the tree, now and at most so far, what the machine has left, used
        swap, now and at most above the start, and what the child reports of its device.
        """
        process_bytes = tree.footprint()
        swap_bytes = meters.swap_used_bytes()
        self.available = [*self.available[-2:], meters.available_bytes()]
        self.peak_process_bytes = max(self.peak_process_bytes, process_bytes)
        self.swap_growth_bytes = max(self.swap_growth_bytes, swap_bytes - self.swap_before)
        now = round(self.seconds_before + self.seconds, 3)
        self.last_seconds = max(now, self.last_seconds + 0.001)  # no two samples at one time
        return {
            "seconds": round(self.last_seconds, 3),
            "process_bytes": process_bytes,
            "peak_process_bytes": self.peak_process_bytes,
            "available_bytes": self.available[-1],
            "swap_used_bytes": swap_bytes,
            "swap_growth_bytes": self.swap_growth_bytes,
            **read_object(self.device_file),
        }


@contextmanager
def keep_awake(pid: int) -> Iterator[None]:
    """Keep a Mac awake and its GPU at full clocks while a process lives.

    `caffeinate -w` ends with that process, so none stays behind even when we are killed.
    """
    command = keep_awake_command(sys.platform, pid)
    if command is None or not shutil.which(command[0]):
        yield
        return
    quiet = subprocess.DEVNULL
    caffeinate = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        caffeinate.terminate()
        caffeinate.wait()


def keep_awake_command(platform_name: str, pid: int) -> list[str] | None:
    """Return the command that keeps a machine awake as long as `pid` lives, None where none is
    needed: only macOS slows down what runs behind a closed lid or a hidden window.
    """
    return ["caffeinate", "-dimsu", "-w", str(pid)] if platform_name == "darwin" else None


def orphan_check() -> Callable[[], None]:
    """Return a function that raises SystemExit once a Snakemake that started us is gone.

    A shell or a terminal may go without ending the study.
    """
    orchestrators = [each for each in psutil.Process().parents() if _is_snakemake(each)]

    def check() -> None:
        if any(map(_is_dead, orchestrators)):
            raise SystemExit("Snakemake is gone, so the training was stopped")

    return check


def _failure(output: OutputCopy) -> Stop | None:
    return endings.failure_stop(output.failure) if output.failure else None


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block by SystemExit, so that the child can save its work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def _ask_to_stop(child: subprocess.Popen) -> None:
    """Ask the child to save its work and end, and give it time to; Ctrl-C cuts that short."""
    with suppress(ProcessLookupError):
        child.terminate()
    with suppress(KeyboardInterrupt):
        _wait(child, GRACE_SECONDS)


def _end_tree(child: subprocess.Popen, tree: meters.ProcessTree) -> None:
    """Kill what is left of the child, its process group and all that it started."""
    tree.list()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait()  # before the tree does, which would take its exit code
    tree.kill()


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


def _is_zero(ratio: str | None) -> bool:
    try:
        return ratio is not None and float(ratio) == 0
    except ValueError:
        return False
