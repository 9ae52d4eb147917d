"""The database of a study: its schema, what a run leaves in it, and the queries of the docs."""

import re
import sqlite3
import time
from pathlib import Path

import pytest

from workflow_scripts.lib import database
from workflow_scripts.lib.jsonl import write_json, write_jsonl
from workflow_scripts.lib.rows import ROW_FIELDS, make_row

DOCS = Path(__file__).parents[1] / "docs/database.md"
QUERIES = re.findall(r"```sql\n(.*?)```", DOCS.read_text("utf-8"), re.S)
STATS = {
    "tokenizer_sha256": "t",
    "strategy": "windows",
    "tools": False,
    **{
        split: {
            "conversations": 2,
            "rows": 10,
            "tokens": 1000,
            "supervised_tokens": 400,
            "length_quantiles": {"min": 20, "p50": 100, "p95": 128, "max": 128},
            "dropped": {"empty-turn": 1},
            "cut": {"answer-split": 3, "context-turn": 7},
        }
        for split in ("train", "val")
    },
}


def make_run(folder, backend, steps=25, **changes):
    row = {
        "study": "s", "backend": backend, "engine": backend, "model": "tiny", "tokenizer": "tiny",
        "context": 128, "variant": "seed0", "status": "ok", "dtype": "float32",
        "tokens_per_s": 900.0, "step_seconds_p50": 0.1, "val_loss_before": 9.0, "val_loss": 7.0,
        "val_token_accuracy_before": 0.0, "val_token_accuracy": 0.1, "val_rows": 10,
        "val_tokens": 400, "gradient_checkpointing": False, "versions": {"python": "3.11"},
    }  # fmt: skip
    write_jsonl(
        folder / f"{backend}.steps.jsonl",
        (
            dict.fromkeys(database.STEP_FIELDS, 1)
            | {"step": step, "seconds": 0.3 if step == 1 else 0.1, "tokens": 90, "loss": 9 / step,
               "padded_tokens": 100, "device_bytes": None}
            for step in range(1, steps + 1)
        ),
    )  # fmt: skip
    write_jsonl(
        folder / f"{backend}.memory.jsonl",
        (dict.fromkeys(database.MEMORY_FIELDS, 5) | {"seconds": second} for second in range(3)),
    )
    return database.Run(
        make_row(row, changes),
        folder / f"{backend}.steps.jsonl",
        folder / f"{backend}.memory.jsonl",
    )


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("database")
    examples = folder / "examples/tiny/128/stats.json"
    write_json(examples, STATS)
    runs = [make_run(folder, "torch"), make_run(folder, "mlx", tokens_per_s=300.0)]
    failed = {"status": "diverged", "reason": "loss nan", "val_loss": None, "context": 256}
    runs.append(make_run(folder, "mlx-4bit", steps=0, bits=4, versions=None, **failed))
    database.write_database(folder / "study.sqlite", runs, [examples])
    with sqlite3.connect(folder / "study.sqlite") as connection:
        yield connection
    connection.close()


def rows(connection, query):
    return connection.execute(query).fetchall()


def test_runs_have_the_fields_of_a_row_and_no_others(connection):
    columns = [name for (name,) in rows(connection, "SELECT name FROM pragma_table_info('runs')")]
    assert columns == ["run", "examples", *(name for name in ROW_FIELDS if name != "versions")]


def test_every_reference_holds_and_every_one_has_an_index(connection):
    assert rows(connection, "PRAGMA foreign_key_check") == []
    assert rows(connection, "PRAGMA integrity_check") == [("ok",)]
    tables = re.findall(r"CREATE TABLE (\w+)", database.SCHEMA.read_text("utf-8"))
    assert len(tables) == 8
    for table in tables:
        for _, _, _, column, *_ in rows(connection, f"PRAGMA foreign_key_list({table})"):
            indexed = rows(
                connection,
                f"SELECT info.name FROM pragma_index_list('{table}') AS list, "
                f"pragma_index_info(list.name) AS info WHERE info.name = '{column}'",
            )
            assert indexed, (table, column)


def test_what_a_run_leaves(connection):
    query = "SELECT backend, count(*), max(step) FROM steps JOIN runs USING (run) GROUP BY run"
    assert rows(connection, query) == [("torch", 25, 25), ("mlx", 25, 25)]
    query = "SELECT run, moment, loss, token_accuracy, rows FROM evaluations"
    assert sorted(rows(connection, query)) == [
        (1, "after", 7.0, 0.1, 10), (1, "before", 9.0, 0.0, 10),
        (2, "after", 7.0, 0.1, 10), (2, "before", 9.0, 0.0, 10),
        (3, "before", 9.0, 0.0, 10),
    ]  # fmt: skip
    assert rows(connection, "SELECT count(*), max(seconds) FROM memory_samples") == [(9, 2.0)]
    assert rows(connection, "SELECT run, package FROM versions") == [(1, "python"), (2, "python")]
    query = "SELECT run, examples, gradient_checkpointing FROM runs"
    assert rows(connection, query) == [(1, 1, 0), (2, 1, 0), (3, None, 0)]


def test_what_the_examples_leave(connection):
    query = "SELECT tokenizer, context, strategy, tools FROM examples"
    assert rows(connection, query) == [("tiny", 128, "windows", 0)]
    assert rows(connection, "SELECT split, rows, length_max FROM splits") == [
        ("train", 10, 128), ("val", 10, 128)
    ]  # fmt: skip
    assert rows(connection, "SELECT what, reason, count FROM left_out WHERE split = 'val'") == [
        ("cut", "answer-split", 3), ("cut", "context-turn", 7), ("dropped", "empty-turn", 1)
    ]  # fmt: skip


def test_views(connection):
    query = "SELECT backend, weights, tokens_per_s FROM speed_by_context"
    assert rows(connection, query) == [("mlx", "float32", 300.0), ("torch", "float32", 900.0)]
    query = (
        "SELECT step, loss, tokens_so_far, round(seconds_so_far, 1) FROM loss_at_step "
        "WHERE backend = 'mlx' AND step IN (1, 3)"
    )
    assert rows(connection, query) == [(1, 9.0, 90, 0.3), (3, 3.0, 270, 0.5)]
    query = "SELECT backend, loss_before, loss_after FROM learning"
    assert rows(connection, query) == [("mlx", 9.0, 7.0), ("torch", 9.0, 7.0)]


def test_the_docs_have_ten_queries():
    assert len(QUERIES) == 10


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.split("\n")[0][:60])
def test_each_query_of_the_docs_answers_something(connection, query):
    cursor = connection.execute(query)
    names = [column[0] for column in cursor.description]
    found = cursor.fetchall()
    assert found
    computed = [at for at, name in enumerate(names) if name not in ROW_FIELDS]
    assert all(any(row[at] is not None for row in found) for at in computed), names


def test_a_damaged_file_leaves_the_database_of_before(tmp_path):
    target = tmp_path / "study.sqlite"
    database.write_database(target, [make_run(tmp_path, "torch")], [])
    before = target.read_bytes()
    run = make_run(tmp_path, "torch")
    run.steps_file.write_text('{"step": 1}\n{"step"')
    with pytest.raises(ValueError, match=r"torch\.steps\.jsonl, line 2: not JSON"):
        database.write_database(target, [run], [])
    assert target.read_bytes() == before
    assert list(tmp_path.glob(".*")) == []


def test_a_large_study_loads_while_one_waits(tmp_path):
    """Measured, not timed: 100 runs of 1,000 steps took 1 to 2 s on 2 cores; 10 s was asked for."""
    run = make_run(tmp_path, "torch", steps=1000)
    runs = [run._replace(row={**run.row, "variant": f"v{number}"}) for number in range(100)]
    started = time.perf_counter()
    database.write_database(tmp_path / "study.sqlite", runs, [])
    print(f"100 runs of 1,000 steps: {time.perf_counter() - started:.1f} s")
    with sqlite3.connect(tmp_path / "study.sqlite") as connection:
        assert rows(connection, "SELECT count(*) FROM steps") == [(100_000,)]
    connection.close()
