"""Work shared by processes: the same results in the same order, and no silence when one dies."""

import os
import signal

import pytest
from session_maker import assistant, header, user, write_files

from workflow_scripts.lib import corpus, pool


def add(item, made):
    if item == "bad":
        raise ValueError("a bad item")
    if item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return item + made


def one(number):
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_items(processes):
    assert list(pool.in_order(add, range(50), processes, one, (3,))) == list(range(3, 53))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_of_a_process_is_raised_here(processes):
    with pytest.raises(ValueError, match="a bad item"):
        list(pool.in_order(add, [1, "bad", 2], processes, one, (3,)))


def test_a_killed_process_is_named():
    with pytest.raises(RuntimeError, match="one of 2 processes was killed"):
        list(pool.in_order(add, [1, "killed", 2], 2, one, (3,)))


def test_small_work_is_not_shared():
    assert pool.processes_for(1000) == 1
    assert pool.processes_for(1 << 30) == pool.usable_cores()


def test_files_read_ahead_give_what_files_read_in_turn_give(tmp_path, monkeypatch):
    """Forks, copies and broken lines over many files; groups of one file, so that all is ahead."""
    monkeypatch.setattr(corpus, "BYTES_AT_A_TIME", 1)
    start = [user("u", None, "q"), assistant("a", "u", "A"), user("v", "a", "q2")]
    files = {}
    for number in range(6):
        own = [assistant(f"b{number}", "v", f"B{number}"), b"{broken"]
        files[f"{number}.jsonl"] = [header(f"s{number % 5}", second=number), *start, *own]
    write_files(tmp_path, files)

    def read(processes):
        counts, rejected = corpus.Counts(), []
        lines = corpus.lines(
            tmp_path, sorted(files), "all", False, counts, rejected.append, processes
        )
        return list(lines), rejected, corpus.stats_of(counts)

    alone = read(1)
    assert read(2) == alone
    assert alone[2]["supervised_turns"] == 7
    assert alone[2]["unsupervised"] == {"supervised-elsewhere": 5}
