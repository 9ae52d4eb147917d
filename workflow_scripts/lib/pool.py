"""One function over many items in processes of their own, with the results in the items' order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from workflow_scripts.lib.machine import usable_cores

SMALL_BYTES = 8 << 20  # of work that is done sooner than processes have started
AHEAD = 2  # items a process that are waiting or done before their turn: what bounds the memory
_made: object = None  # in a process of the pool: what its setup returned


def processes_for(size: int) -> int:
    """Return how many processes to share work on `size` bytes of session files: all cores, or 1."""
    return 1 if size < SMALL_BYTES else usable_cores()


def nothing() -> None:
    """Stand for the setup of a function that needs none."""


def in_order(
    function: Callable,
    items: Iterable,
    processes: int,
    setup: Callable = nothing,
    arguments: tuple = (),
) -> Iterator:
    """Yield function(item, setup(*arguments)) for each item, in order.

    `setup` runs once in each process; with one process or none, everything runs in this one.
    Function, setup, arguments and items are pickled, so they live in modules. An exception in a
    process is raised here; RuntimeError where a process was killed.
    """
    if processes < 2:
        made = setup(*arguments)
        yield from (function(item, made) for item in items)
        return
    context = multiprocessing.get_context("spawn")  # as on a Mac, and safe beside threads
    pool = ProcessPoolExecutor(processes, context, _start, (setup, arguments))
    try:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(_call, function, item))
            if len(waiting) > processes * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"one of {processes} processes was killed, most likely because memory ran out; run "
            "with fewer cores"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(setup: Callable, arguments: tuple) -> None:
    global _made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _made = setup(*arguments)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _call(function: Callable, item: object) -> object:
    return function(item, _made)
