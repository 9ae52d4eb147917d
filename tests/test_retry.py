"""The command that is shown below a study with runs that did not end well."""

import shlex

from rules.retry import retry_command

ROWS = {
    "torch/qwen/4096/seed0": {"status": "oom"},
    "torch/qwen/1024/seed0": {"status": "ok"},
    "mlx/qwen/4096/a b": {"status": "timeout"},
    "mlx/qwen/1024/seed0": None,
}


def test_all_but_the_good_ones_are_tried_again_with_the_study_they_are_of():
    text = retry_command(ROWS, "results/mine", ["my studies/mine.yaml"], {"a": {"b": 1}, "c": "d"})
    said, command = text.split("\n")
    assert said == (
        "Not ok: torch/qwen/4096/seed0 (oom), mlx/qwen/4096/a b (timeout). To try them again:"
    )
    assert shlex.split(command) == [
        *("snakemake", "--cores", "1", "all", "-R"),
        "results/mine/runs/torch/qwen/4096/seed0/row.json",
        "results/mine/runs/mlx/qwen/4096/a b/row.json",
        *("--config", 'a={"b": 1}', "c=d", "--configfile", "my studies/mine.yaml"),
    ]


def test_nothing_is_said_of_a_study_whose_runs_are_well():
    well = {"torch/qwen/1024/seed0": {"status": "ok"}, "mlx/qwen/1024/seed0": None}
    assert retry_command(well, "results/mine") is None
