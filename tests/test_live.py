"""Progress: what a study's folder says of its runs, the table of it, and the line on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_maker import Job
from rich.console import Console

from workflow_scripts.lib import child_output, launch, live, watch
from workflow_scripts.lib.live import Planned, Progress

ROOT = Path(__file__).parents[1]
FIRST, SECOND = "torch/tiny/128/seed0", "mlx-4bit/tiny/128/seed0"
TRAINER = """
import json, os, sys, time
from pathlib import Path
from workflow_scripts.lib import measure
from workflow_scripts.lib.batches import Batch
from workflow_scripts.lib.jsonl import read_json, write_json
from workflow_scripts.lib.recorder import progress

settings = read_json(sys.argv[1])
state, total = Path(settings["state_folder"]), settings["optimizer_steps"]
write_json(state / "figures.json", {})
print("12:00:00 a line \\x1b[31min red\\x1b[0m", flush=True)
with measure.steps_file(state / "steps.jsonl") as file, progress(total) as show:
    for number in range(1, total + 1):
        time.sleep(0.4)
        step = measure.Step(number, 8.5 - number, 0.1, 1e-3, 1.0, 0.4, 1000, 500, 1024, None)
        measure.write_step(file, step)
        show(step)
write_json(state / "result.json", {"status": "ok", "reason": None, "last_step": total})
"""


class Study:
    """A made study folder: each method leaves what a run leaves at one of its moments."""

    def __init__(self, folder, runs=(FIRST, SECOND), to_train=()):
        self.folder = folder
        self.grid(runs, to_train)

    def grid(self, runs, to_train=()):
        listed = [{"run": run, "optimizer_steps": 30, "to_train": run in to_train} for run in runs]
        write(self.folder / "state/runs.json", json.dumps({"runs": listed}))

    def trains(self, run, steps=None, seconds=0.5):
        """A run in its state folder: `steps` None while it loads, then how many it has made."""
        state = self.folder / "state" / run
        write(state / "settings.json", json.dumps({"optimizer_steps": 30}))
        samples = [
            {"seconds": n, "process_bytes": 300_000_000 + n, "peak_process_bytes": 400_000_000}
            for n in range(3)
        ]
        write(state / "memory.jsonl", lines(samples))
        if steps is not None:
            write(state / "figures.json", "{}")
            write(state / "steps.jsonl", lines(step(n, seconds) for n in range(1, steps + 1)))
        return state

    def is_cut_off(self, run, steps):
        """A training that was killed a minute ago."""
        state = self.trains(run, steps)
        write(state / "lock", "")
        age(state / "memory.jsonl", 60)
        return state

    def has_ended(self, run, status="ok", last_step=30):
        self.is_cut_off(run, last_step)
        write(self.folder / "state" / run / "result.json", "{}")
        row = {"status": status, "last_step": last_step, "wall_seconds": 61.4}
        row |= {"tokens_per_s": 3210.4, "peak_process_bytes": 1_530_000_000}
        published = self.folder / "runs" / run
        write(published / "row.json", json.dumps(row))
        write(published / "steps.jsonl", lines(step(n) for n in range(1, last_step + 1)))
        return published

    def read(self):
        return {run.run: run for run in live.read_study(self.folder)}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lines(values):
    return "".join(json.dumps(value) + "\n" for value in values)


def step(number, seconds=0.5):
    slow = 20 if number == 1 else 1  # as when an engine compiles
    return {
        "step": number,
        "loss": 9 - number / 10,
        "tokens": 500,
        "seconds": seconds * slow,
        "device_bytes": 2_000_000,
        "learning_rate": 0.00012345,
    }


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path / "results/made")


def test_each_moment_of_a_run_has_its_name(study):
    assert study.read()[FIRST] == Progress(FIRST, "waiting", total=30)
    study.trains(FIRST)
    assert study.read()[FIRST].status == "preparing"
    for steps, status in ((0, "validating"), (1, "training"), (29, "training"), (30, "validating")):
        study.trains(FIRST, steps)
        assert (study.read()[FIRST].status, study.read()[FIRST].step) == (status, steps)
    write(study.folder / "state" / FIRST / "result.json", "{}")
    assert study.read()[FIRST].status == "finishing"
    study.has_ended(FIRST, "diverged", 12)
    ended = study.read()[FIRST]
    assert (ended.status, ended.done, ended.step, ended.total) == ("diverged", True, 12, 30)
    assert (ended.elapsed, ended.peak_process_bytes) == (61.4, 1_530_000_000)
    assert ended.loss == pytest.approx(7.8)
    assert study.read()[SECOND].status == "waiting"


def test_figures_of_a_training_are_those_of_its_recent_steps(study):
    state = study.trains(FIRST, 12)
    age(state / "steps.jsonl", 0.2)
    now = study.read()[FIRST]
    assert now.loss == pytest.approx(7.8)
    assert now.tokens_per_s == 1000
    assert now.remaining == pytest.approx(18 * 0.5 - 0.2, abs=0.2)
    assert (now.process_bytes, now.peak_process_bytes) == (300_000_002, 400_000_000)
    assert (now.device_bytes, now.elapsed) == (2_000_000, 2)
    age(state / "steps.jsonl", 500)
    assert study.read()[FIRST].remaining == pytest.approx(17 * 0.5), "a step may take its time"
    study.trains(FIRST, 1)
    assert study.read()[FIRST].tokens_per_s == 50, "the first step is all there is"


def test_half_a_line_damage_and_long_files(study):
    state = study.trains(FIRST, 3)
    with open(state / "steps.jsonl", "a") as file:
        file.write('[1]\n{"step": 9}\nnot JSON\n{"step": 4, "loss": 8.')
    write(state / "memory.jsonl", '{"seconds": 1, "process')
    now = study.read()[FIRST]
    assert (now.step, now.process_bytes, now.elapsed) == (3, None, None)
    (state / "steps.jsonl").write_bytes(b"\xff\xfe\n")
    assert study.read()[FIRST].status == "validating"
    write(state / "steps.jsonl", lines(step(n) for n in range(1, 100_000)))
    started = time.perf_counter()
    assert study.read()[FIRST].step == 99_999
    assert time.perf_counter() - started < 0.2


def test_files_may_vanish_at_any_moment(study, monkeypatch):
    """Snakemake deletes a row, a new training the state, while they are read."""
    published, state = study.has_ended(FIRST), study.trains(SECOND, 5)
    written = live.written

    def vanish(path):
        found = written(path)
        shutil.rmtree(published, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)
        return found

    monkeypatch.setattr(live, "written", vanish)
    runs = study.read()
    assert runs[FIRST].status == "waiting"
    assert runs[SECOND].status in ("waiting", "preparing")


def test_a_damaged_row_is_none(study):
    row = study.has_ended(FIRST) / "row.json"
    for text in ("", "{", "[]", "{}", '{"status": 1}'):
        row.write_text(text)
        assert study.read()[FIRST].status == "waiting"


def test_a_training_that_was_killed_is_stopped(study):
    study.is_cut_off(FIRST, 7)
    stopped = study.read()[FIRST]
    assert (stopped.status, stopped.step, stopped.active) == ("stopped", 7, False)
    assert stopped.remaining is stopped.process_bytes is stopped.tokens_per_s is None


def test_a_training_whose_samples_wait_is_alive_while_it_holds_the_lock(study):
    """As on a machine that swaps."""
    state = study.is_cut_off(FIRST, 7)
    with launch._alone_in(state):
        assert study.read()[FIRST].status == "training"
    assert study.read()[FIRST].status == "stopped"


def test_to_watch_takes_no_lock_from_a_training(study):
    state = study.is_cut_off(FIRST, 7)
    with open(state / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # another watcher at the same instant
        assert live.read_run(study.folder, FIRST, Planned()).status == "stopped"
    before = sorted(study.folder.rglob("*"))
    study.read()
    with open(state / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sorted(study.folder.rglob("*")) == before


def test_a_row_that_is_to_be_made_again_is_not_done(study):
    for run in (FIRST, SECOND):
        age(study.has_ended(run) / "row.json", 60)
    study.grid((FIRST, SECOND), to_train=(SECOND,))
    assert (study.read()[FIRST].status, study.read()[SECOND].status) == ("ok", "waiting")
    study.has_ended(SECOND)
    age(study.folder / "state/runs.json", 10)
    assert study.read()[SECOND].status == "ok"


def test_a_study_without_its_grid_lists_what_it_has(study):
    study.has_ended(FIRST)
    study.trains(SECOND, 5)
    (study.folder / "state/runs.json").unlink()
    assert [(run.run, run.status, run.total) for run in live.read_study(study.folder)] == [
        (SECOND, "training", 30),
        (FIRST, "ok", 30),
    ]
    shutil.rmtree(study.folder / "state")
    assert [run.run for run in live.read_study(study.folder)] == [FIRST]


def test_the_place_of_a_run_in_its_study(study):
    state = study.folder / "state" / SECOND
    assert live.place(state) == "run 2 of 2"
    (study.folder / "state/runs.json").unlink()
    assert live.place(state) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 MB"),
        (311_800_000, "312 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (1_534_000_000, "1.53 GB"),
        (9_999_000_000, "10.0 GB"),
        (139_400_000_000, "139 GB"),
        (None, ""),
    ],
)
def test_sizes(count, text):
    assert live.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (14.4, "0:14"), (59.7, "1:00"), (3725, "1:02:05"), (-1, "0:00"), (None, "")],
)
def test_times(seconds, text):
    assert live.clock(seconds) == text


@pytest.mark.parametrize("place", ["", "run 2 of 5"])
def test_lines_on_steps_are_known_again(place):
    line = live.step_line(place, 12, 30, 8.12341, 3210.4, 311_800_000, None, 14.2)
    assert line.endswith("step 12 of 30: loss 8.1234, 3,210 tokens/s, 312 MB, 14 s remaining")
    assert live.is_step_line(f"12:30:40 {line}")
    assert not live.is_step_line("12:30:40 validation before: loss 8.9, accuracy 0.1%")


def test_the_live_line_fits_the_terminal(study):
    state = study.trains(SECOND, 12)
    text = live.live_line(state, 200)
    assert text.startswith("run 2 of 2  mlx-4bit tiny 128 seed0  step 12 of 30  loss 7.80  1,000 ")
    assert re.search(r"tokens/s  300 MB  2 MB on the device  0:0[89] left$", text)
    narrow = live.live_line(state, 80)
    assert narrow.startswith("run 2 of 2  step 12 of 30  loss 7.80  1,000 tokens/s  300 MB")
    assert narrow.endswith(" left")
    assert all(len(live.live_line(state, columns)) <= columns for columns in range(1, 120))


def table(study, width, height=None):
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as shown:
        console.print(watch.table("made", live.read_study(study.folder), console, height))
    return shown.get().splitlines()


@pytest.mark.parametrize("count", [1, 11, 60])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_fits(tmp_path, count, width):
    runs = [f"mlx-4bit/qwen2.5-0.5b/{context}/seed0" for context in range(1024, 1024 + count)]
    study = Study(tmp_path, runs)
    for run in runs[: count // 2]:
        study.has_ended(run)
    study.trains(runs[count // 2], 12)
    shown = table(study, width, 24)
    assert len(shown) < 24
    assert max(map(len, shown)) <= width
    assert shown[0].startswith(f"made: {count // 2} of {count} runs done, ")
    training = next(line for line in shown if "training" in line)
    assert training.startswith(f"mlx-4bit qwen2.5-0.5b {1024 + count // 2} seed0 ")
    for figure in ("12/30", "7.80", "1,000", "300 MB", "0:0"):
        assert figure in training
    assert ("40%" in training) == (width > 80)
    assert "…" not in "".join(shown)
    if count == 60:
        assert shown[-1] == "and 40 more: 20 ok, 20 waiting"


def test_long_names_are_shortened_and_no_figure_is(tmp_path):
    long = "mlx-4bit/qwen2.5-0.5b/2048/low-rank-warm-seed1"
    study = Study(tmp_path, [long, FIRST])
    study.trains(long, 12)
    shown = table(study, 80)
    assert shown[2].startswith(
        "mlx-4bit qwen… 2048 low-rank-warm-seed1 training 12/30 7.80    1,000 300 MB"
    )
    assert shown[3].startswith("torch tiny 128 seed0 ")
    assert max(map(len, shown)) <= 80


def test_stopped_runs_are_shown_before_waiting_ones(tmp_path):
    runs = [f"torch/tiny/{context}/seed0" for context in range(60)]
    study = Study(tmp_path, runs)
    study.is_cut_off(runs[50], 3)
    study.trains(runs[2], 3)
    statuses = [line.split()[4] for line in table(study, 80, 10)[2:-1]]
    assert statuses == ["waiting"] * 2 + ["training"] + ["waiting"] * 2 + ["stopped"]


def run_watch(*arguments, folder, **options):
    return subprocess.run(
        [sys.executable, "-m", "workflow_scripts.lib.watch", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        **options,
    )


def test_watch_once_prints_the_study_that_changed_last(study, tmp_path):
    study.trains(SECOND, 12)
    study.has_ended(FIRST)
    older = Study(tmp_path / "results/older")
    for file in older.folder.rglob("*"):
        age(file, 1000)
    for arguments in ((), ("--once",), ("--once", study.folder)):
        done = run_watch(*arguments, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
        title, headings, first, second = done.stdout.splitlines()
        assert title == "made: 1 of 2 runs done, 1:03 elapsed"
        assert headings.split() == [column.heading for column in watch.LAYOUTS[0][1]]
        figures = ["30/30 100%", "6.00", "3,210", "1.53 GB", "1:01"]
        assert re.split(r"  +", first.strip()) == ["torch tiny 128 seed0", "ok", *figures]
        assert re.match(r"mlx-4bit tiny 128 seed0  training  12/30  40%  7.80 ", second)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "results/: no study here; start one with: snakemake --cores 1 all"),
        (("results/none",), "results/none: not a study, there is no such folder"),
        ((".",), ".: not a study, it has neither state/ nor runs/"),
    ],
)
def test_watch_says_in_one_line_what_is_no_study(tmp_path, arguments, said):
    done = run_watch(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{said}\n")


class Terminal:
    """A program under a terminal of its own."""

    def __init__(self, *arguments, folder):
        self.output = b""
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(PYTHONPATH=f"{ROOT}:{folder}", TERM="xterm-256color", COLUMNS="120")
            os.execv(sys.executable, [sys.executable, *map(str, arguments)])

    def wait_for(self, pattern, seconds=30):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.output):
            assert time.monotonic() < deadline, self.output
            assert self._read(), self.output

    def wait(self, seconds=30):
        """The exit status, once the program has ended."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, self.output
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self):
        if select.select([self.end], [], [], 0.5)[0]:
            try:
                data = os.read(self.end, 65536)
            except OSError:  # what Linux says at the end
                data = b""
            self.output += data
            return bool(data)
        return True

    def press_ctrl_c(self):
        os.write(self.end, b"\x03")

    def close(self):
        os.close(self.end)


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(*arguments, folder):
        opened.append(Terminal(*arguments, folder=folder))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()
        try:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def test_watch_on_a_terminal_follows_the_study_until_all_is_done(study, terminal):
    study.has_ended(FIRST)
    study.trains(SECOND, 12)
    shown = terminal("-m", "workflow_scripts.lib.watch", folder=study.folder.parents[1])
    shown.wait_for(rb"12/30  40%")
    study.trains(SECOND, 13)
    shown.wait_for(rb"13/30  43%")
    study.has_ended(SECOND)
    assert shown.wait() == 0
    assert b"2 of 2 runs done" in shown.output
    assert shown.output.rstrip().endswith(b"\x1b[?25h"), "the cursor is back"


def test_ctrl_c_ends_watching_quietly(study, terminal):
    shown = terminal("-m", "workflow_scripts.lib.watch", folder=study.folder.parents[1])
    shown.wait_for(rb"waiting")
    shown.press_ctrl_c()
    assert shown.wait() == 0
    assert b"Traceback" not in shown.output


@pytest.fixture
def job(study):
    """A folder with a job that trains SECOND for some seconds, without an engine."""
    state = Path("results/made/state", SECOND)
    return Job(study.folder.parents[1], TRAINER, state, settings={"engine": "mlx"})


def check_log(folder):
    log = (folder / "job.log").read_bytes()
    assert not re.search(rb"[^\n\x20-\x7e]", log), log
    assert b"12:00:00 a line in red\n" in log
    said = rb"run 2 of 2, step 8 of 8: loss 0.5000, 2,500 tokens/s, \d+ MB, 0 s remaining\n"
    assert re.search(said, log), log


def test_a_terminal_gets_one_live_line_and_the_log_plain_ones(job, terminal):
    folder = job.folder
    shown = terminal("job.py", folder=folder)
    shown.wait_for(rb"run 2 of 2  mlx-4bit tiny 128 seed0  step [3-7] of 8  loss")
    watched = run_watch("--once", folder=folder)
    assert re.search(r"mlx-4bit tiny 128 seed0 +training +[3-7]/30 ", watched.stdout)
    assert shown.wait() == 0
    assert b"a line in red\r\n" in shown.output
    assert b"step 8 of 8: " not in shown.output, "a step has its place in the live line"
    assert re.search(rb"2,500 tokens/s  \d+ MB  0:0\d left", shown.output)
    assert shown.output.rfind(b"\x1b[?25h") > shown.output.rfind(b"\x1b[?25l")
    check_log(folder)


def test_without_a_terminal_the_same_is_said_in_plain_lines(job):
    exit_code, said = job.run()
    assert exit_code == 0
    assert "\x1b" not in said
    assert "run 2 of 2, step 1 of 8: loss 7.5000, " in said
    check_log(job.folder)


def test_lines_as_a_terminal_would_leave_them():
    assert child_output.plain("loading: 10%\rloading: 20%\rloaded\r\n") == "loaded"
    assert child_output.plain("\x1b[1;31mbad\x1b[0m\tand \x07loud\n") == "bad\tand loud"
