"""What a training child says: into the job's log, and onto the screen of who watches."""

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from workflow_scripts.lib import live

LINES_KEPT = 25
CONTROL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


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


def make_echo(live_line: Callable[[int], str] | None) -> Echo:
    """Return a live echo where `live_line` is given and our stderr is a terminal, else a plain one.

    `live_line` gets a number of columns and says in one line how far the training is.
    """
    terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
    if live_line and terminal and os.environ.get("TERM") not in (None, "dumb", "unknown"):
        return LiveEcho(live_line)
    return Echo()


class OutputCopy:
    """A thread that copies a child's output to the end of a log and to an echo, as plain lines.

    `last_lines` are the last that came; `failure` is the first line for which `is_failure` holds.
    """

    def __init__(
        self, output: IO[bytes], log_file: str | Path, echo: Echo, is_failure: Callable[[str], bool]
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.failure: str | None = None
        self._source, self._log_file, self._echo = output, log_file, echo
        self._is_failure = is_failure
        self._thread = threading.Thread(target=self._copy, daemon=True, name="child-output")
        self._thread.start()

    def finish(self, seconds: float = 5.0) -> None:
        """Wait for what is still in the pipe; a grandchild that holds it open isn't waited for."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        with open(self._log_file, "a", encoding="utf-8", buffering=1) as log:
            for raw in self._source:
                line = plain(raw.decode("utf-8", errors="replace"))
                self.last_lines.append(line)
                with suppress(OSError):  # a full disk; the guard's to say
                    log.write(line + "\n")
                if self.failure is None and self._is_failure(line):
                    self.failure = line
                with suppress(OSError):
                    self._echo.say(line)


def plain(line: str) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites, and codes, gone."""
    return CONTROL_CODES.sub("", line.rstrip().rpartition("\r")[2])
