"""Meters of memory: of a process tree, of the machine, of the kernel's killer.

On macOS a process's footprint is what the system itself judges it by: resident, compressed and
swapped pages and GPU buffers, but no shared libraries. On Linux resident bytes come nearest; in a
tree of several processes each counts its share of the pages that they have in common.
"""

import ctypes
import functools
import re
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

SECONDS_BETWEEN_LISTINGS = 5.0  # a listing walks over all processes of the machine
SECONDS_PER_SECOND_OF_LOOKING = 100
RUSAGE_INFO_V0 = 0
RUSAGE_BYTES = 96  # struct rusage_info_v0 in <sys/resource.h>
FOOTPRINT_AT = 16 + 7 * 8  # after the UUID and seven 64-bit counters
SWAP_USED = re.compile(r"\bused = ([\d.,]+)([KMGT]?)")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
CGROUP_ROOT = Path("/sys/fs/cgroup")


class ProcessTree:
    """A process and all that it started, also what left its process group."""

    def __init__(self, pid: int) -> None:
        self.members: dict[psutil.Process, None] = {}  # in the order of their discovery
        self.listed = float("-inf")
        self.own_share = 1.0  # of the resident bytes, pages in common counted once
        self.next_look = float("-inf")
        with suppress(psutil.Error):
            self.members[psutil.Process(pid)] = None

    def footprint(self) -> int:
        """Return the bytes that the tree takes; 0 once it is gone."""
        if time.monotonic() - self.listed >= SECONDS_BETWEEN_LISTINGS:
            self.list()
        pids = [process.pid for process in self.members]
        if sys.platform == "darwin":
            return sum(map(_physical_footprint, pids))
        resident = sum(map(_resident_bytes, pids))
        if len(pids) <= 1 or not resident:
            return resident
        if time.monotonic() >= self.next_look:
            self._look_for_common_pages(pids, resident)
        return round(resident * self.own_share)

    def _look_for_common_pages(self, pids: list[int], resident: int) -> None:
        """Linux walks over all pages to tell, 0.1 s for 10 GB: so it is asked now and then."""
        started = time.monotonic()
        self.own_share = (
            sum(_proportional_bytes(pid) or _resident_bytes(pid) for pid in pids) / resident
        )
        now = time.monotonic()
        self.next_look = now + SECONDS_PER_SECOND_OF_LOOKING * (now - started)

    def list(self) -> list[psutil.Process]:
        """Look for processes anew; return those that are alive."""
        self.listed = time.monotonic()
        for process in list(self.members):
            with suppress(psutil.Error):
                self.members.update(dict.fromkeys(process.children(recursive=True)))
        self.members = {each: None for each in self.members if _is_alive(each)}
        return list(self.members)

    def kill(self) -> None:
        """Kill every process of the tree, children that appear meanwhile too."""
        while living := self.list():
            for process in living:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(living, timeout=1)


def swap_used_bytes() -> int:
    """Return the bytes of swap in use on this machine."""
    try:
        return psutil.swap_memory().used
    except (psutil.Error, OSError, RuntimeError):
        if sys.platform != "darwin":
            return 0
    command = ["sysctl", "-n", "vm.swapusage"]
    return parse_swap_usage(subprocess.run(command, capture_output=True, text=True).stdout)


def parse_swap_usage(text: str) -> int:
    """Return the used bytes in what macOS's `sysctl vm.swapusage` prints.

    Raises ValueError for a text that names none.
    """
    found = SWAP_USED.search(text)
    if not found:
        raise ValueError(f"sysctl vm.swapusage: {text!r} names no used swap")
    return round(float(found[1].replace(",", ".")) * UNITS[found[2]])


def available_bytes() -> int:
    """Return the bytes that this machine can still give without swapping."""
    return psutil.virtual_memory().available


def total_bytes() -> int:
    """Return the bytes of memory in this machine."""
    return psutil.virtual_memory().total


def kernel_oom_kills(pid: int | str = "self", root: Path = CGROUP_ROOT) -> int | None:
    """Return how many processes the kernel has killed for want of memory where `pid` lives.

    Counted by the process's control group (version 2 or 1) or, where that counts nothing, by the
    whole machine; None where nobody counts, as on macOS.
    """
    for file in [*_cgroup_counters(pid, root), Path("/proc/vmstat")]:
        try:
            counters = dict(line.split() for line in file.read_text().splitlines())
            return int(counters["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _cgroup_counters(pid: int | str, root: Path) -> list[Path]:
    """Files that may count: of the group's path, and of the root that a container sees instead."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            files += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            memory = root / "memory"
            files += [memory / inside / "memory.oom_control", memory / "memory.oom_control"]
    return files


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _proportional_bytes(pid: int) -> int:
    """PSS of a process on Linux; 0 where the kernel doesn't say."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _physical_footprint(pid: int) -> int:
    """What macOS's Activity Monitor calls the memory of a process; 0 when it is gone."""
    buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
    if _libproc().proc_pid_rusage(pid, RUSAGE_INFO_V0, buffer) != 0:
        return 0
    return footprint_in(buffer.raw)


def footprint_in(usage: bytes) -> int:
    """Return ri_phys_footprint out of the bytes of a `struct rusage_info_v0`."""
    return struct.unpack_from("=Q", usage, FOOTPRINT_AT)[0]


@functools.cache
def _libproc() -> ctypes.CDLL:
    return ctypes.CDLL("/usr/lib/libproc.dylib")


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def prefer_as_victim(pid: int) -> None:
    """Let Linux's killer take this process before any other of ours, such as Snakemake."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("500")
