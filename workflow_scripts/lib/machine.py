"""Which machine a run was measured on: chip, operating system, cores."""

import os
import platform
import subprocess
import sys
from pathlib import Path


def describe_machine() -> dict:
    """Return `chip` and `os` as people name them."""
    return {"chip": chip_name(), "os": f"{platform.system()} {platform.release()}"}


def chip_name() -> str:
    """The processor's marketing name, such as "Apple M4", or what the platform calls it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on; fewer than the machine's under taskset or a cluster."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
