"""The data stages on corpora of growing size: time and peak memory of each, in its own process.

    python -m benchmarks.scale --sessions FOLDER --tokenizer FOLDER --megabytes 10 100 1000

The corpora are the sessions repeated and varied. Linear in size means the same MB/s in each column.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import made_corpus
from workflow_scripts.lib.machine import usable_cores
from workflow_scripts.read_sessions import read_sessions
from workflow_scripts.snapshot_sessions import snapshot_sessions
from workflow_scripts.split_sessions import split_sessions
from workflow_scripts.tokenize_and_mask import tokenize_and_mask

VAL_ROWS, SEED = 256, 0
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


def stages(folder: Path, tokenizer: Path, context: int) -> dict[str, tuple[Callable, list]]:
    """Return by name the functions of the rules and their arguments."""
    at = folder.joinpath
    conversations, train, val = at("conversations.jsonl"), at("train.jsonl"), at("val.jsonl")
    read = [at("raw"), at("manifest.json"), conversations, at("rejected.jsonl"), at("read.json")]
    examples = [at("train-rows.jsonl"), at("val-rows.jsonl"), at("rows.json"), context]
    return {
        "snapshot_sessions": (
            snapshot_sessions,
            ["path", at("raw"), at("manifest.json"), str(at("made"))],
        ),
        "read_sessions": (read_sessions, read),
        "split_sessions": (split_sessions, [conversations, train, val, VAL_ROWS, SEED]),
        "tokenize_and_mask": (tokenize_and_mask, [train, val, tokenizer, *examples]),
    }


def measured(function: Callable, arguments: list) -> tuple[float, int]:
    """Run a function in a new process; return its seconds and the peak in bytes.

    The peak is its own plus that of the largest of its helpers, times their number.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, arguments))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    return found


def _child(sender: Connection, function: Callable, arguments: list) -> None:
    started = time.perf_counter()
    function(*arguments)
    each = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest, if any
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = (own + usable_cores() * each) * MAXRSS_BYTES
    sender.send((time.perf_counter() - started, peak))


def main() -> None:
    """Print one line a stage and size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=Path, default=Path("sample_sessions"))
    parser.add_argument("--tokenizer", type=Path, default=Path("results/demo/models/tiny"))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 100, 1000])
    given = parser.parse_args()
    for megabytes in given.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            sources = made_corpus.session_files(given.sessions)
            size = made_corpus.make_corpus(sources, folder / "made", int(megabytes * 1e6))
            for name, (function, arguments) in stages(
                folder, given.tokenizer, given.context
            ).items():
                seconds, peak = measured(function, arguments)
                print(
                    f"{size / 1e6:8,.0f} MB {name:18} {seconds:8.1f} s "
                    f"{size / 1e6 / seconds:7.1f} MB/s  peak {peak / 1e6:6,.0f} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
