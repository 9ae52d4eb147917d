"""The workflow as people run it: a small study from end to end, and exactly what reruns when."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = [
    ".venv",
    ".git",
    "results",
    ".snakemake",
    "build",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
]
SESSIONS = 10
STUDY = """
study: small
sessions: {source: path, paths: [SESSIONS]}
split: {val_rows: 3}
models: {tiny: {source: shape, vocabulary: 512, hidden_size: 64, intermediate_size: 128, layers: 1}}
backends:
  torch: {engine: torch}
  mlx-4bit: {engine: mlx, bits: 4}
training: {optimizer_steps: 3, micro_batch: 4, warmup_steps: 1}
runs:
  - {backend: torch, model: tiny, context: 128}
  - {backend: mlx-4bit, model: tiny, context: 128}
"""
AFTER_TRAINING = {"summarize_runs", "plot_runs", "all"}


class Project:
    """A copy of the project in a folder of its own, with a study to run.

    The folder's name has a space in it, and so has the interpreter's path, as after `make all`.
    """

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        (folder / ".venv").symlink_to(sys.prefix)
        self.python = str(folder / ".venv/bin" / Path(sys.executable).name)
        self.sessions = folder.parent / "my sessions"
        self.sessions.mkdir()
        self.files = sorted((ROOT / "sample_sessions").glob("*.jsonl"))
        for file in self.files[:SESSIONS]:
            shutil.copy(file, self.sessions)
        self.write_study(STUDY)

    def write_study(self, text, name="small.yaml"):
        (self.folder / name).write_text(text.replace("SESSIONS", json.dumps(str(self.sessions))))

    def command(self, *arguments, study="small.yaml"):
        configfile = ["--configfile", study] if study else []
        return [self.python, "-m", "snakemake", "--cores", "1", *arguments, *configfile]

    def run(self, *arguments, study="small.yaml", environment=None):
        return subprocess.run(
            self.command(*arguments, study=study),
            cwd=self.folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
        )

    def plan(self, *arguments, **options):
        """Jobs by rule that a dry run lists; empty when there is nothing to be done."""
        done = self.run("-n", *(arguments or ["all"]), **options)
        assert done.returncode == 0, done.stdout + done.stderr
        output = done.stdout + done.stderr
        if "Nothing to be done" in output:
            return {}
        table = output.split("Job stats:")[1].split("total")[0]
        return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}

    def edit(self, file, old, new):
        path = self.folder / file
        text = path.read_text("utf-8")
        assert old in text, f"{file} does not contain {old!r}"
        path.write_text(text.replace(old, new, 1), "utf-8")

    def restore(self, file):
        shutil.copy2(ROOT / file, self.folder / file)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The finished small study; tests put back what they change."""
    project = Project(tmp_path_factory.mktemp("a place") / "the project")
    done = project.run("all")
    assert done.returncode == 0, done.stdout + done.stderr
    project.first_output = done.stdout + done.stderr
    return project


@pytest.fixture
def restored(project):
    """The study's own config again, after a test that writes another one."""
    yield project
    project.write_study(STUDY)


def test_the_whole_study_leaves_what_the_design_names(project):
    results = project.folder / "results/small"
    rows = {
        backend: json.loads((results / f"runs/{backend}/tiny/128/seed0/row.json").read_text())
        for backend in ("torch", "mlx-4bit")
    }
    for backend, row in rows.items():
        assert row["status"] == "ok"
        assert row["examples_sha256"] == rows["torch"]["examples_sha256"]
        assert row["optimizer_steps"] == 3
        assert row["val_loss"] > 0
        assert row["peak_process_bytes"] > 0
        run = results / f"runs/{backend}/tiny/128/seed0"
        assert step_numbers(run / "steps.jsonl") == [1, 2, 3]
        assert list((run / "adapter").glob("*.safetensors"))
        card = (run / "adapter/README.md").read_text("utf-8")
        assert f"| validation loss | {row['val_loss_before']:.4f} | {row['val_loss']:.4f} |" in card
        assert f"results/small/runs/{backend}/tiny/128/seed0/adapter" in card
        assert (run / "memory.jsonl").read_text()
        assert (results / f"state/{backend}/tiny/128/seed0/settings.json").is_file()
    names = "summary.csv summary.md plots/loss.svg plots/speed.svg plots/memory.svg manifest.json"
    for name in [*names.split(), "examples/description.md", "sessions/rejected.jsonl"]:
        assert (results / name).is_file(), name
    database = sqlite3.connect(results / "study.sqlite")
    assert database.execute("SELECT count(*) FROM steps JOIN runs USING (run)").fetchone() == (6,)


def step_numbers(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_it_ends_with_the_summary_table_and_where_it_lies(project):
    end = project.first_output[project.first_output.index("# Study small") :]
    assert re.search(r"\| mlx-4bit +\| tiny +\| 128", end)
    assert "Summary: results/small/summary.md" in end


@pytest.mark.parametrize("seed", ["1", "2"])
def test_nothing_to_do_when_nothing_changed(project, seed):
    assert project.plan(environment={"PYTHONHASHSEED": seed}) == {}


def test_touching_every_file_of_the_repository_reruns_nothing(project):
    for path in project.folder.rglob("*"):
        inside = path.relative_to(project.folder).parts[0]
        if path.is_file() and inside not in ("results", ".snakemake", ".venv"):
            os.utime(path)
    assert project.plan() == {}


def test_another_run_trains_alone(restored):
    restored.write_study(STUDY + "  - {backend: mlx-4bit, model: tiny, context: 128, seed: 1}\n")
    alone = {"draw_adapter": 1, "train_mlx": 1}
    assert restored.plan() == {**alone, **dict.fromkeys(AFTER_TRAINING, 1)}


def test_another_learning_rate_of_one_backend_retrains_its_runs_alone(restored):
    restored.write_study(STUDY.replace("bits: 4}", "bits: 4, learning_rate: 0.5}"))
    assert restored.plan() == {"train_mlx": 1, **dict.fromkeys(AFTER_TRAINING, 1)}


def test_moving_lines_of_the_config_reruns_nothing(restored):
    restored.write_study(
        STUDY.replace(
            "{optimizer_steps: 3, micro_batch: 4, warmup_steps: 1}",
            "{warmup_steps: 1, micro_batch: 4, optimizer_steps: 3}",
        )
    )
    assert restored.plan() == {}


def test_two_settings_that_swap_their_values_are_noticed(restored):
    swapped = STUDY.replace("micro_batch: 4, warmup_steps: 1", "micro_batch: 1, warmup_steps: 4")
    restored.write_study(swapped)
    assert restored.plan() == {"train_torch": 1, "train_mlx": 1, **dict.fromkeys(AFTER_TRAINING, 1)}


def test_a_change_in_masking_makes_examples_anew_but_not_sessions(project):
    module = "workflow_scripts/lib/masking.py"
    project.edit(module, '"""', '"""Changed. ')
    try:
        planned = project.plan()
    finally:
        project.restore(module)
    assert planned == {
        "tokenize_and_mask": 1,
        "describe_examples": 1,
        "train_torch": 1,
        "train_mlx": 1,
        **dict.fromkeys(AFTER_TRAINING, 1),
    }
    assert project.plan() == {}


def test_a_change_in_the_mlx_trainer_retrains_mlx_alone(project):
    module = "workflow_scripts/lib/mlx_lora.py"
    project.edit(module, '"""', '"""Changed. ')
    try:
        planned = project.plan()
    finally:
        project.restore(module)
    assert planned == {"train_mlx": 1, **dict.fromkeys(AFTER_TRAINING, 1)}


def test_a_new_session_file_waits_until_it_is_asked_for(project):
    new = project.sessions / project.files[SESSIONS].name
    shutil.copy(project.files[SESSIONS], new)
    try:
        assert project.plan() == {}
        planned = project.plan("all", "-R", "snapshot_sessions")
        assert planned["snapshot_sessions"] == planned["read_sessions"] == 1
        look = ("snapshot_sessions", "-R", "snapshot_sessions")
        assert project.run(*look).returncode == 0
        planned = project.plan()
        assert planned["read_sessions"] == planned["train_torch"] == 1
        assert "snapshot_sessions" not in planned
    finally:
        new.unlink()
    assert project.run(*look).returncode == 0
    assert project.plan() == {}, "the sessions are those of before, so nothing is made again"


def test_a_study_takes_nothing_from_the_default_one_and_lies_beside_it(project):
    """Training keys that config.yaml sets and this study does not have the schema's defaults."""
    project.write_study(
        STUDY.replace("study: small", "study: other").replace("training:", "#"), "other.yaml"
    )
    planned = project.run("-n", "--printshellcmds", "all", study="other.yaml")
    assert "results/other/runs/torch/tiny/128/seed0/row.json" in planned.stdout + planned.stderr
    assert "results/demo" not in planned.stdout + planned.stderr
    done = project.run(
        "results/other/sessions/train.jsonl", "--config", "training={optimizer_steps: 2}",
        study="other.yaml",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (project.folder / "results/other/sessions/train.jsonl").is_file()
    assert project.plan() == {}


def test_config_overrides_single_keys_of_either_study(project):
    changed = project.plan("all", "--config", "backends={mlx-4bit: {learning_rate: 0.3}}")
    assert changed == {"train_mlx": 1, **dict.fromkeys(AFTER_TRAINING, 1)}
    default = project.run("-n", "all", "--config", "study=renamed", study=None)
    assert "results/renamed/summary.md" in default.stdout + default.stderr


def test_a_wrong_config_ends_before_anything_runs(project):
    done = project.run("all", "--config", "training={optimizer_step: 3}")
    assert done.returncode != 0
    assert "Config error: training.optimizer_step: unknown key, did you mean" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Building DAG" not in done.stderr


def test_a_missing_engine_gives_a_row_that_is_made_again_once_it_is_there(restored, tmp_path):
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name.startswith('mlx') else find(name, *a)\n"
    )
    restored.write_study(STUDY + "  - {backend: mlx-4bit, model: tiny, context: 128, seed: 5}\n")
    row = "results/small/runs/mlx-4bit/tiny/128/seed5/row.json"
    without = {"PYTHONPATH": str(tmp_path)}
    done = restored.run(row, environment=without)
    assert done.returncode == 0, done.stderr
    written = json.loads((restored.folder / row).read_text())
    assert written["status"] == "unavailable"
    assert "mlx and mlx-lm are not installed" in written["reason"]
    assert restored.plan(row, environment=without) == {}
    assert restored.plan(row) == {"train_mlx": 1}


def test_a_bug_in_one_training_fails_red_with_its_log_while_others_go_on(restored):
    module = "workflow_scripts/lib/torch_lora.py"
    restored.write_study(STUDY.replace("study: small", "study: buggy"))
    path = restored.folder / module
    path.write_text("raise ArithmeticError('a bug of the test')\n" + path.read_text("utf-8"))
    try:
        done = restored.run("all")
    finally:
        restored.restore(module)
    assert done.returncode != 0
    assert "ArithmeticError: a bug of the test" in done.stderr
    results = restored.folder / "results/buggy"
    assert (results / "runs/mlx-4bit/tiny/128/seed0/row.json").is_file()
    assert not (results / "runs/torch/tiny/128/seed0/row.json").exists()
    assert "ArithmeticError" in (results / "logs/train_torch/torch/tiny/128/seed0.log").read_text()
    done = restored.run("summarize_present")
    assert done.returncode == 0, done.stderr
    text = (results / "present/summary.md").read_text("utf-8")
    assert "Still missing (1 run):\n\n- torch/tiny/128/seed0" in text
    assert text in done.stderr


@pytest.mark.parametrize("backend", ["torch", "mlx-4bit"])
def test_after_kill_9_the_same_command_completes_with_each_step_once(restored, backend):
    line = f"{{backend: {backend}, model: tiny, context: 128, variant: long, optimizer_steps: 150}}"
    restored.write_study(f"{STUDY}  - {line}\n")
    run = f"{backend}/tiny/128/long"
    row = f"results/small/runs/{run}/row.json"
    live = restored.folder / f"results/small/state/{run}/steps.jsonl"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    snakemake = subprocess.Popen(restored.command(row), cwd=restored.folder, **quiet)
    wait_until(lambda: live.is_file() and live.read_bytes().count(b"\n") >= 3, seconds=120)
    family = psutil.Process(snakemake.pid).children(recursive=True)
    snakemake.kill()
    snakemake.wait()
    wait_until(lambda: not any(each.is_running() for each in family), seconds=20)
    assert step_numbers(live) == list(range(1, live.read_bytes().count(b"\n") + 1))
    assert not (restored.folder / row).exists()

    done = restored.run(row)
    assert done.returncode == 0, done.stdout + done.stderr
    published = (restored.folder / row).with_name("steps.jsonl")
    assert step_numbers(published) == list(range(1, 151))


OUT_OF_MEMORY = """
import resource

resource.setrlimit(resource.RLIMIT_AS, (3_000_000_000,) * 2)
kept = bytes(6_000_000_000)
"""


def test_out_of_memory_is_a_result_and_the_command_to_try_again_is_shown(restored):
    module = "workflow_scripts/lib/torch_lora.py"
    restored.write_study(STUDY.replace("study: small", "study: poor"))
    path = restored.folder / module
    path.write_text(OUT_OF_MEMORY + path.read_text("utf-8"))
    try:
        done = restored.run("all")
        row = "results/poor/runs/torch/tiny/128/seed0/row.json"
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((restored.folder / row).read_text())["status"] == "oom"
        summary = (restored.folder / "results/poor/summary.md").read_text("utf-8")
        said = "(seed0): oom. MemoryError, after step 0 of 3; try micro_batch 2 (was 4), or"
        assert said in summary
        assert re.search(r"\| mlx-4bit .* ok ", summary)
        assert "Not ok: torch/tiny/128/seed0 (oom). To try them again:" in done.stderr
        command = f"snakemake --cores 1 all -R {row} --configfile small.yaml"
        assert command in done.stderr
        assert restored.plan() == {}, "it is a result, so nothing is missing"
        words = command.removesuffix(" --configfile small.yaml").split()[3:]
        assert restored.plan(*words) == {"train_torch": 1, **dict.fromkeys(AFTER_TRAINING, 1)}
    finally:
        restored.restore(module)


def test_other_limits_and_other_checkpoints_retrain_nothing(restored):
    limits = "memory: {limit_bytes: 9000000000, swap_growth_bytes: null}\ntraining: "
    changed = STUDY.replace("training: ", limits).replace(
        "warmup_steps: 1", "warmup_steps: 1, checkpoint_seconds: 7, timeout_seconds: 5000"
    )
    assert changed != STUDY
    restored.write_study(changed)
    assert restored.plan() == {}


def wait_until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.2)


def test_the_report_holds_table_and_plots_under_labels(project):
    done = project.run("--report", "report.html")
    assert done.returncode == 0, done.stderr
    text = (project.folder / "report.html").read_text("utf-8")
    for part in ("loss by step", "mlx-4bit", "summary.md", '"backend"', '"context"'):
        assert part in text, part


def test_a_training_is_watched_from_another_process(restored):
    line = "{backend: mlx-4bit, model: tiny, context: 128, variant: watched, optimizer_steps: 150}"
    restored.write_study(f"{STUDY}  - {line}\n")
    row = "results/small/runs/mlx-4bit/tiny/128/watched/row.json"
    live = restored.folder / "results/small/state/mlx-4bit/tiny/128/watched/steps.jsonl"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    snakemake = subprocess.Popen(restored.command(row), cwd=restored.folder, **quiet)
    wait_until(lambda: live.is_file() and live.read_bytes().count(b"\n") >= 3, seconds=120)
    training, ended, _ = watched(restored)
    family = psutil.Process(snakemake.pid).children(recursive=True)
    snakemake.kill()
    snakemake.wait()
    wait_until(lambda: not any(each.is_running() for each in family), seconds=20)
    time.sleep(4)  # longer than a memory sample counts as new
    stopped, _, _ = watched(restored)
    assert re.match(r"training +\d+/150 +\d+%  \d\.\d\d +[\d,]+  \d+ MB ", training)
    assert re.match(r"ok +3/3 +100%  ", ended)
    assert re.match(r"stopped +\d+/150 ", stopped)


def watched(project):
    """What the watcher says of the run named watched, the other of its backend, and of torch's."""
    done = subprocess.run(
        [project.python, "-m", "workflow_scripts.lib.watch", "--once", "results/small"],
        cwd=project.folder,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    runs = ("mlx-4bit tiny 128 watched", "mlx-4bit tiny 128 seed0", "torch tiny 128 seed0")
    return [re.search(rf"^{run} +(.*)$", done.stdout, re.M)[1] for run in runs]
