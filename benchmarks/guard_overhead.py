"""What the guard costs: processor time of the parent beside a child that holds much memory.

    python -m benchmarks.guard_overhead [--gigabytes 10] [--seconds 60]

Prints the guard's processor time as a share of one core; the child sleeps on its memory.
"""

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

from workflow_scripts.lib import guard
from workflow_scripts.lib.jsonl import read_jsonl

CHILD = """
import sys, time
kept = bytearray(int(float(sys.argv[1]) * 1e9))
kept[::4096] = b"x" * len(kept[::4096])  # really there
time.sleep(float(sys.argv[2]))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory = Path(folder, "memory.jsonl")
        before = resource.getrusage(resource.RUSAGE_SELF)
        ending = guard.run_child(
            [sys.executable, "-c", CHILD, str(options.gigabytes), str(options.seconds)],
            guard.child_environment(dict(os.environ), 1),
            Path(folder, "log"),
            memory,
        )
        after = resource.getrusage(resource.RUSAGE_SELF)
        samples = len(list(read_jsonl(memory)))
    if ending.exit_code:
        raise SystemExit("\n".join(ending.last_lines))
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"child of {ending.peak_process_bytes / 1e9:.1f} GB: {samples} samples in "
        f"{ending.wall_seconds:.0f} s took {spent:.2f} s of processor time, "
        f"{spent / ending.wall_seconds:.2%} of a core"
    )


if __name__ == "__main__":
    main()
