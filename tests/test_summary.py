"""From row.json and steps.jsonl files to the table, the text, the database and the charts."""

import json
import sqlite3

import polars as pl
import pytest

from workflow_scripts.lib import caveats, comparison, headings, tables
from workflow_scripts.lib.jsonl import write_json, write_jsonl
from workflow_scripts.lib.rows import ROW_FIELDS, make_row
from workflow_scripts.plot_runs import plot_runs
from workflow_scripts.summarize_present import summarize_present

OK = {
    "study": "s",
    "engine": "torch",
    "device": "cpu",
    "dtype": "float32",
    "model": "tiny",
    "tokenizer": "tiny",
    "context": 256,
    "variant": "seed0",
    "recipe": "matched",
    "status": "ok",
    "optimizer_steps": 3,
    "tokens_per_s": 1234.5,
    "supervised_tokens_per_s": 321.0,
    "peak_process_bytes": 512_000_000,
    "val_loss_before": 9.8765,
    "val_loss": 5.4321,
    "val_token_accuracy": 0.25,
    "wall_seconds": 12.3,
    "examples_sha256": "e",
    "chip": "Chip",
    "os": "Linux",
    "versions": {"torch": "2", "python": "3.11"},
}


def write_run(results, backend, steps=3, **changes):
    row = make_row(OK, {"backend": backend}, changes)
    folder = results / "runs" / backend / row["model"] / str(row["context"]) / row["variant"]
    write_json(folder / "row.json", row)
    write_jsonl(folder / "memory.jsonl", [{"seconds": 0.1, "process_bytes": 5}])
    write_jsonl(
        folder / "steps.jsonl",
        (
            {
                "step": number,
                "loss": 9.0 - number,
                "token_accuracy": 0.1,
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
                "seconds": 0.5,
                "tokens": 100,
                "supervised_tokens": 30,
                "padded_tokens": 28,
                "device_bytes": None,
            }
            for number in range(1, steps + 1)
        ),
    )
    return folder.relative_to(results / "runs").as_posix()


@pytest.fixture
def results(tmp_path):
    write_json(
        tmp_path / "sessions/stats.json",
        {
            "files": 4,
            "sessions": 5,
            "conversations": 6,
            "supervised_turns": 70,
            "lines_read": 800,
            "lines_rejected": 9,
            "rejected": {"broken-json": 8, "not-an-object": 1},
            "removed": {"aborted": 2},
            "redacted": {"aws-key": 2, "password": 1},
            "skipped_files": 0,
        },
    )
    return tmp_path


def test_row_has_every_field_in_order_and_refuses_unknown_status():
    assert tuple(make_row({"status": "ok"})) == ROW_FIELDS
    with pytest.raises(ValueError, match="'fine' is none of ok"):
        make_row({"status": "fine"})


def test_summary_of_present_runs_names_the_missing(results):
    runs = [
        write_run(results, "torch"),
        write_run(results, "mlx-4bit", engine="mlx", bits=4, val_loss=None, status="diverged",
                  reason="loss nan at step 2"),
        "mlx-16bit/tiny/256/seed0",
    ]  # fmt: skip
    text_file = summarize_present("s", str(results), runs)
    text = text_file.read_text("utf-8")
    assert "# Study s: 2 runs, 1 ok" in text
    assert "- mlx-16bit/tiny/256/seed0" in text
    assert "diverged. loss nan at step 2" in text
    assert "- lines: 800 read, 9 rejected" in text
    assert "- rejected: broken-json 8, not-an-object 1" in text
    assert "- secrets replaced: aws-key 2, password 1" in text
    table = pl.read_csv(results / "present/summary.csv")
    assert table.columns == list(ROW_FIELDS)
    assert table["val_loss"].to_list() == [5.4321, None]
    for name in ("loss", "speed", "memory", *runs[:2]):
        assert (results / f"present/plots/{name}.svg").read_text("utf-8").startswith("<svg")


def caveats_of(*changes):
    rows = [
        make_row(OK, {"backend": f"b{number}"}, change) for number, change in enumerate(changes)
    ]
    return caveats.caveats(pl.DataFrame(rows, infer_schema_length=None))


def test_runs_of_one_problem_on_one_machine_need_no_caveat():
    assert caveats_of({}, {"engine": "mlx", "device": "metal"}) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"utilization": 1.4}, "b1, tiny, 256 tokens (seed0): implausible. Its rate implies 1.4"),
        ({"dtype": "float16"}, "float16 runs scale the loss by a power of two"),
        ({"val_tokens": 465, "val_rows": 11}, "only 465 supervised tokens in 11 rows"),
        ({"train_seconds": 1.5}, "Some runs trained for less than 10 s"),
        ({"skipped_steps": 2}, "2 of 3 optimizer steps were skipped"),
        ({"tokens_per_s": None}, "no rate, since every step saw a row length for the first time"),
        ({"bits": 4, "group_size": 64}, "another base"),
        ({"recipe": "published"}, "losses of different recipes are not comparable"),
        ({"examples_sha256": "f"}, "over different rows"),
        ({"model": "small"}, "nothing about an engine"),
        ({"model_sha256": "m"}, "Runs of tiny stand on different weights"),
        ({"engine": "mlx"}, "says nothing about a Mac's GPU"),
        ({"chip": "Other"}, "measured on different machines"),
        ({"micro_batch": 2}, "compare tokens per second, not steps"),
        ({"gradient_checkpointing": True}, "costs time and saves memory"),
    ],
)  # fmt: skip
def test_each_caveat_is_said_where_it_applies_and_only_there(change, said):
    same = {"micro_batch": 4, "gradient_checkpointing": False}
    assert caveats_of(same, same) == []
    (note,) = caveats_of(same, same | change)
    assert said in note


def test_published_optimizers_differ_by_engine():
    notes = caveats_of(*({"recipe": "published", "engine": engine} for engine in ("torch", "mlx")))
    assert any("AdamW with a cosine in PyTorch, plain Adam" in note for note in notes)


def test_a_run_that_did_not_end_well_raises_no_caveat():
    assert caveats_of({}, {"status": "diverged", "recipe": "published", "chip": "Other"}) == []


def test_losses_share_a_letter_only_within_one_problem():
    published = {"recipe": "published"}
    rows = [
        make_row(OK, change)
        for change in (
            {}, {"engine": "mlx", "dtype": "bfloat16"}, {"bits": 4}, {"bits": 4, "engine": "mlx"},
            {"examples_sha256": "f"}, published, published | {"engine": "mlx"}, {"model": "m"},
        )
    ]  # fmt: skip
    assert "".join(caveats.same_problem(rows)) == "AABBCDEF"


def test_agreement_is_said_of_both_engines_on_one_problem_solved_alike():
    def said(*changes):
        return caveats.agreements([make_row(OK, {"val_loss": 5.0}, change) for change in changes])

    mlx = {"engine": "mlx", "backend": "mlx-16bit", "val_loss": 5.05}
    (note,) = said({"backend": "torch"}, mlx)
    assert note.startswith("Problem A, seed0: torch and mlx-16bit end 1% apart in loss")
    (note,) = said({"backend": "torch"}, mlx | {"val_loss": 5.000001})
    assert "end less than 0.001% apart" in note
    assert said({}, {"val_loss": 5.05}) == []
    for change in (
        {"bits": 4},
        {"learning_rate": 0.5},
        {"variant": "hot"},
        {"recipe": "published"},
    ):
        assert said({}, mlx | change) == []


def test_a_speed_that_cannot_be_true_is_marked_in_the_main_table():
    rows = [make_row(OK, {"utilization": 0.5}), make_row(OK, {"utilization": 1.4})]
    table = comparison.named(comparison.table_of(rows), headings.MAIN)
    assert table["status"].to_list() == ["ok", "ok, implausible"]


def test_no_run_yet_says_where_to_look(results):
    with pytest.raises(FileNotFoundError, match="no run of the study has ended yet; see"):
        summarize_present("s", str(results), ["torch/tiny/256/seed0"])


def test_database_answers_questions_over_runs_and_steps(results):
    runs = [write_run(results, "torch"), write_run(results, "mlx", steps=5, engine="mlx")]
    summarize_present("s", str(results), runs)
    connection = sqlite3.connect(results / "present/study.sqlite")
    counts = connection.execute(
        "SELECT backend, count(*), max(step) FROM runs JOIN steps USING (run) GROUP BY run"
    ).fetchall()
    assert counts == [("torch", 3, 3), ("mlx", 5, 5)]
    types = dict(connection.execute("SELECT name, type FROM pragma_table_info('runs')"))
    assert (types["context"], types["val_loss"], types["backend"]) == ("INTEGER", "REAL", "TEXT")
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_main_table_has_units_variants_and_three_digits(results):
    runs = [write_run(results, "torch"), write_run(results, "torch", variant="hot", context=512)]
    table = comparison.table_of(
        [comparison.read_row(results / "runs" / run / "row.json") for run in runs]
    )
    text = tables.markdown_table(comparison.named(table, headings.MAIN))
    heading, rule, first, second = text.splitlines()
    assert "process peak (MB)" in heading
    assert "variant" in heading
    assert len({len(line) for line in (heading, rule, first, second)}) == 1
    assert " 9.88 " in first
    assert " 1,230 " in first
    assert " 25.0 " in first
    assert " hot " in second


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (9.999, "10.0"), (99.94, "99.9"), (123.4, "123"),
     (1234567.0, "1,230,000"), (-5.4321, "-5.43"), (0.00001234, "0.0000123"), (1.0, "1.00"),
     (0.5, "0.500"), (999.6, "1,000")],
)  # fmt: skip
def test_three_digits(value, text):
    assert tables.three_digits(value) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("null", "not the row of a run: it holds NoneType; delete it and run again"),
        ('{"study": "s"}', r"lacks \d+ fields, such as backend, engine, device; delete it"),
        (json.dumps({**make_row(OK), "status": "fine"}), "has status 'fine', none of ok, oom"),
        (json.dumps(make_row(OK, {"val_loss": "zero"})), "has no number in val_loss"),
        ("{", "not JSON"),
        ("\udcff\udcfe", "not JSON"),
    ],
)
def test_broken_row_names_the_file(tmp_path, text, problem):
    file = tmp_path / "row.json"
    file.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=rf"row\.json: {problem}|row\.json: .*{problem}"):
        comparison.read_row(file)


def test_a_run_without_its_steps_is_missing(results):
    runs = [write_run(results, "torch"), write_run(results, "mlx", engine="mlx")]
    (results / "runs" / runs[1] / "steps.jsonl").unlink()
    text = summarize_present("s", str(results), runs).read_text("utf-8")
    assert f"Still missing (1 run):\n\n- {runs[1]}" in text


def test_charts_of_a_study_without_a_successful_run(results, tmp_path):
    run = results / "runs" / write_run(results, "torch", steps=0, status="unavailable", **{
        "tokens_per_s": None, "peak_process_bytes": None})  # fmt: skip
    files = [str(tmp_path / f"{name}.svg") for name in ("loss", "speed", "memory", "run")]
    plot_runs([str(run / "row.json")], [str(run / "steps.jsonl")], *files[:3], files[3:])
    assert "No run has logged a step yet." in (tmp_path / "loss.svg").read_text("utf-8")
