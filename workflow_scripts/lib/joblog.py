"""What a job says while it works: plain timed lines in its log, a progress bar on a terminal."""

import errno
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

SECONDS_BETWEEN_LINES = 5.0


def say(text: str) -> None:
    """Print one line with the local time, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def announce(text: str) -> None:
    """Say a line in the log, and to the person at the terminal."""
    say(text)
    if sys.stdout is not sys.__stdout__ and sys.__stderr__ is not None:
        with suppress(OSError):
            print(text, file=sys.__stderr__, flush=True)


@contextmanager
def to_file(path: str | Path) -> Iterator[None]:
    """Send what the block prints to a log file; an exception leaves its traceback there.

    The exception itself goes on to the caller, and its last line to the real stderr, so that a
    person sees what is wrong without opening the log.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(b"")
    with open(path, "a", encoding="utf-8", buffering=1) as log:  # others append to it too
        try:
            with redirect_stdout(log), redirect_stderr(log):
                yield
        except KeyboardInterrupt:
            print(
                f"stopped; run the same command again\n(log: {path})", file=sys.stderr, flush=True
            )
            raise SystemExit(130) from None
        except Exception as error:
            traceback.print_exc(file=log)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                error = OSError("the disk that holds results/ is full; make room, then run again")
            print(f"{type(error).__name__}: {error}\n(log: {path})", file=sys.stderr, flush=True)
            raise SystemExit(1) from None


def track(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield the items, showing progress: a bar on a terminal, else a line every few seconds."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)
    if sys.stdout.isatty():
        from rich.progress import track as rich_track

        yield from rich_track(items, description=what, total=total)
        return
    started = last = time.monotonic()
    count = 0
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            say(f"{what}: {count}" + (f" of {total}" if total else ""))
    say(f"{what}: {count} in {time.monotonic() - started:.1f} s")
