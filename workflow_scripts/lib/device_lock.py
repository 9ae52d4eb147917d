"""One training at a time on a device, whoever starts it: a lock of the user, in no project."""

import fcntl
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workflow_scripts.lib.joblog import announce

FOLDER = "pi-finetune-workflow"
SECONDS_BETWEEN_TRIES = 0.5
SECONDS_BETWEEN_LINES = 60.0


def device_name(device: str, platform_name: str, environment: dict[str, str]) -> str:
    """Return which device of this machine a run will take: "gpu", "cpu", or "cuda-…".

    Told without importing an engine, and in doubt the GPU: PyTorch's mps and MLX's metal are the
    same one on a Mac.
    """
    if device == "cpu":
        return "cpu"
    if platform_name == "darwin":
        return "gpu" if device in ("auto", "mps", "metal") else device
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if device == "auto" and (visible in ("", "-1") or not _nvidia_here()):
        return "cpu"
    return f"cuda-{(visible or '0').split(',')[0]}"


def lock_folder(platform_name: str, environment: dict[str, str], home: Path) -> Path:
    """Return the user's folder for such files, where the platform's convention has it."""
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / FOLDER
    if platform_name == "darwin":
        return home / "Library/Caches" / FOLDER
    return home / ".cache" / FOLDER


@contextmanager
def alone_on(device: str, what: str, tick: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold a device's lock and yield its descriptor, for the child to inherit: then the kernel
    frees it only when both are gone. While another training holds it, wait and say so.

    `what` is what others are told that is running here; `tick` is called while waiting and may
    raise.
    """
    file = _lock_file(device)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        wait_for(descriptor, lambda: f"{_holder(descriptor)} holds the {device}", tick)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{what} (process {os.getpid()})".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def wait_for(
    descriptor: int, held: Callable[[], str], tick: Callable[[], None] = lambda: None
) -> float:
    """Take a lock, saying now and then who holds it; return the seconds that it took."""
    started, said = time.monotonic(), float("-inf")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - started
            if waited - said >= SECONDS_BETWEEN_LINES:
                announce(f"waiting: {held()}" + (f"; {waited:.0f} s so far" if waited > 1 else ""))
                said = waited
        else:
            return time.monotonic() - started
        tick()
        time.sleep(SECONDS_BETWEEN_TRIES)


def _lock_file(device: str) -> Path:
    """The lock's file, named after the host as well: home folders are shared in clusters."""
    name = re.sub(r"[^\w.-]", "_", f"{platform.node()}-{device}.lock")
    folder = lock_folder(sys.platform, dict(os.environ), Path.home())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(0o600)
    except OSError:  # no home to write in
        folder = Path(tempfile.gettempdir(), f"{FOLDER}-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / name


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode("utf-8", "replace") or "another training"


def _nvidia_here() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
