"""What a training child owes the guard that started it: to stop when asked, and with it; and to
report its device's memory, which no one else can read.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workflow_scripts.lib.endings import STOPPED
from workflow_scripts.lib.guard import GRACE_SECONDS, PARENT_WATCHED
from workflow_scripts.lib.measure import Memory

SECONDS_BETWEEN_REPORTS = 1.0


class StoppedError(Exception):
    """Raised between micro-batches when this process was asked to stop."""


class StopRequest:
    """Whether somebody asked this process to stop; until training begins it just ends."""

    def __init__(self) -> None:
        self.made = False
        self.deferred = False  # from then on, `raise_if_made` is called often

    def make(self, *_: object) -> None:
        """Take note; a handler of signals."""
        self.made = True
        if not self.deferred:
            os._exit(STOPPED)

    def raise_if_made(self) -> None:
        """Raise StoppedError if somebody asked; called where a checkpoint can be made."""
        if self.made:
            raise StoppedError


def obey(request: StopRequest) -> None:
    """Stop on SIGTERM, and when the guard is gone, so that no orphan trains on beside a rerun.

    Does nothing for a trainer that a person started, whose standard input is not ours.
    """
    if os.environ.get(PARENT_WATCHED) != "1":
        return
    signal.signal(signal.SIGTERM, request.make)

    def wait_for_end_of_file() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would stall the interpreter's end
            pass
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):  # nobody reads them any more
            os.dup2(nowhere, output)
        request.make()
        time.sleep(GRACE_SECONDS)
        os._exit(STOPPED)

    threading.Thread(target=wait_for_end_of_file, daemon=True, name="parent-watch").start()


def report_device(file: str | Path, memory: Callable[[], Memory]) -> None:
    """Leave the counters of the device in a file, each second, for the guard's samples.

    Says nothing of a device that has none, such as PyTorch's CPU.
    """
    if memory().used is None:
        return
    file = Path(file)
    temporary = file.with_name(f".{file.name}.tmp")

    def report() -> None:
        while True:
            now = memory()
            values = {
                "device_bytes": now.used,
                "peak_device_bytes": now.peak,
                "peak_reserved_bytes": now.reserved,
            }
            with suppress(OSError):
                temporary.write_text(json.dumps(values))
                os.replace(temporary, file)
            time.sleep(SECONDS_BETWEEN_REPORTS)

    threading.Thread(target=report, daemon=True, name="device-memory").start()
