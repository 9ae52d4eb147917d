"""Conversations to token rows: our `tokenize_and_mask` beside TRL's own route, in one run.

    python -m benchmarks.prepare --sessions FOLDER --tokenizer FOLDER

The sessions are repeated and varied to `--megabytes`, then read once. Both routes start from the
same conversations. `windows`: TRL gets one row a conversation, and what its truncation cuts off
counts for nothing. `turns`: TRL gets the very rows that ours cut, as prompt and completion. Ours
loads and proves the template and writes the rows to disk within its time; TRL's tokenizer is loaded
and its data set built before the clock starts. TRL runs with one process and with all cores, and
the faster counts.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import made_corpus, trl_route
from benchmarks.trl_route import Prepared
from workflow_scripts.lib import jsonl, template_proof
from workflow_scripts.lib.examples import Choices, Tally, examples_of
from workflow_scripts.read_sessions import read_sessions
from workflow_scripts.snapshot_sessions import snapshot_sessions


def ours(conversations: Path, tokenizer: Path, rows: Path, choices: Choices) -> Prepared:
    """Make the rows as the rule does."""
    started = time.perf_counter()
    chat, coder = template_proof.load_chat(tokenizer, choices.thinking, choices.tools)
    tally = Tally()
    made = examples_of(jsonl.read_jsonl(conversations), chat, coder, choices, tally)
    count = jsonl.write_jsonl(rows, made)
    seconds = time.perf_counter() - started
    return Prepared(count, sum(tally.lengths), tally.supervised_tokens, seconds)


def fastest(routes: list[Callable[[], Prepared]], repeats: int) -> list[Prepared]:
    """Run the routes in turn, `repeats` times, and give each its median time."""
    results = [[route() for route in routes] for _ in range(repeats)]
    return [
        runs[0]._replace(seconds=statistics.median(run.seconds for run in runs))
        for runs in zip(*results, strict=True)
    ]


def compare(strategy: str, folder: Path, tokenizer: Path, context: int, repeats: int) -> None:
    """Print a line for each route, and the ratio."""
    conversations, rows = folder / "conversations.jsonl", folder / f"{strategy}.jsonl"
    choices = Choices(context=context, strategy=strategy)
    ours(conversations, tokenizer, rows, choices)
    chat, _ = template_proof.load_chat(tokenizer, choices.thinking, choices.tools)
    if strategy == "windows":
        given = list(trl_route.whole_conversations(conversations, chat.format))
    else:
        given = list(trl_route.same_rows(conversations, rows, chat.format))
    routes = [lambda: ours(conversations, tokenizer, rows, choices)]
    for processes in (None, os.cpu_count()):
        route = trl_route.route(given, str(tokenizer), context, processes)
        routes.append(lambda route=route: trl_route.prepare(route))
    our, *trls = fastest(routes, repeats)
    trl = min(trls, key=lambda each: each.seconds)
    for name, each in ((f"{strategy}, ours", our), (f"{strategy}, TRL", trl)):
        print(
            f"{name:14} {each.rows:8,} rows {each.tokens:12,} tokens "
            f"{each.supervised_tokens:11,} supervised {each.seconds:8.2f} s "
            f"{each.supervised_tokens / each.seconds:12,.0f} supervised tokens/s"
        )
    ratio = our.supervised_tokens / our.seconds / (trl.supervised_tokens / trl.seconds)
    print(f"{strategy}: {ratio:.1f} times as many supervised tokens a second", flush=True)


def main() -> None:
    """Make the corpus, read it, and run both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=Path, default=Path("sample_sessions"))
    parser.add_argument("--tokenizer", type=Path, default=Path("results/demo/models/tiny"))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=["windows", "turns"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        made = folder / "made"
        size = made_corpus.make_corpus(
            made_corpus.session_files(given.sessions), made, int(given.megabytes * 1e6)
        )
        started = time.perf_counter()
        snapshot_sessions("path", folder / "raw", folder / "manifest.json", str(made))
        read_sessions(
            folder / "raw",
            folder / "manifest.json",
            folder / "conversations.jsonl",
            folder / "rejected.jsonl",
            folder / "stats.json",
        )
        seconds = time.perf_counter() - started
        print(
            f"{size / 1e6:.1f} MB of sessions copied, redacted and read in {seconds:.2f} s: "
            f"{size / 1e6 / seconds:.1f} MB/s"
        )
        for strategy in given.strategies:
            compare(strategy, folder, given.tokenizer, given.context, given.repeats)


if __name__ == "__main__":
    main()
