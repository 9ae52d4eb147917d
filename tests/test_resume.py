"""A training that is cut off goes on from its last checkpoint as if nothing had happened."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from job_maker import Job, wait_until
from safetensors.numpy import load_file

from workflow_scripts.lib import checkpoints, launch, tiny_problem, training
from workflow_scripts.lib.precision import LossScale
from workflow_scripts.lib.under_guard import StoppedError, StopRequest

ENGINES = ("torch", "mlx")
STEPS = 8
TIMES = {"seconds", "new_shape", "device_bytes"}  # what another process may do differently


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return tiny_problem.make_model(tmp_path_factory.mktemp("resume") / "model")


def loader(engine):
    from workflow_scripts.lib import mlx_lora, torch_lora

    return {"torch": torch_lora, "mlx": mlx_lora}[engine].load


def settings(folder, model, engine, name, **changes):
    return tiny_problem.settings(
        folder, model, engine, name, optimizer_steps=STEPS, checkpoint_seconds=0, **changes
    )


class StopAt(StopRequest):
    """Asks to stop at the n-th question, as a signal would."""

    def __init__(self, questions):
        super().__init__()
        self.left = questions

    def raise_if_made(self):
        if self.deferred:
            self.left -= 1
            self.made = self.left <= 0
        super().raise_if_made()


def cut_off(run, engine, questions):
    """Train until the n-th micro-batch, then stop; return the folder of the last checkpoint."""
    with pytest.raises(StoppedError):
        training.run(run, loader(engine), StopAt(questions))
    found = checkpoints.latest(Path(run["state_folder"], "checkpoints"), run["identity"], STEPS)
    return str(found.folder)


def outcome(run):
    """All that must be the same: the steps without their times, and every number of the adapter."""
    state = Path(run["state_folder"])
    steps = [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in (state / "steps.jsonl").read_text().splitlines()
    ]
    (file,) = (state / "adapter").glob("*.safetensors")
    return steps, load_file(file)


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, array in wanted[1].items():
        assert array.tobytes() == found[1][name].tobytes(), name


@pytest.mark.parametrize("recipe", ["matched", "published"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path, tiny, engine, recipe):
    whole = settings(tmp_path, tiny, engine, "whole", recipe=recipe)
    result = training.run(whole, loader(engine))
    parts = settings(tmp_path, tiny, engine, "parts", recipe=recipe)
    resumed = parts
    for questions in (4, 6):  # in the middle of step 2, at the beginning of step 5
        folder = cut_off(resumed, engine, questions)
        resumed = {**parts, "resume": folder}
    again = training.run(resumed, loader(engine))
    assert [step["step"] for step in outcome(resumed)[0]] == list(range(1, STEPS + 1))
    assert_same(outcome(resumed), outcome(whole))
    for key in ("val_loss_before", "val_loss", "val_token_accuracy", "trained_tokens"):
        assert again[key] == result[key], key
    assert (result["resumed"], again["resumed"]) == (0, 2)
    assert again["distinct_shapes"] == result["distinct_shapes"]


def test_a_training_that_was_cut_off_after_its_last_step_only_validates(tmp_path, tiny):
    for engine in ENGINES:
        whole = settings(tmp_path, tiny, engine, "whole")
        result = training.run(whole, loader(engine))
        state = Path(whole["state_folder"])
        wanted = outcome(whole)
        folder = str(state / f"checkpoints/step-{STEPS:06}")
        again = training.run({**whole, "resume": folder}, loader(engine))
        assert_same(outcome(whole), wanted)
        assert again["val_loss"] == result["val_loss"]
        assert again["train_seconds"] == result["train_seconds"]


def test_a_checkpoint_is_safetensors_and_json_and_the_last_two_are_kept(tmp_path, tiny):
    for engine in ENGINES:
        run = settings(tmp_path, tiny, engine, "kept")
        training.run(run, loader(engine))
        state = Path(run["state_folder"])
        kept = sorted(path.name for path in (state / "checkpoints").iterdir())
        assert kept == [f"step-{STEPS - 1:06}", f"step-{STEPS:06}"]
        kinds = {path.suffix for path in state.rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".json", ".jsonl", ".md"}
        names = {path.name for path in (state / "checkpoints" / kept[0]).iterdir()}
        groups = {
            f"{group}.safetensors" for group in ("adapter", "optimizer", "loss_scale", "random")
        }
        assert names == groups | {"progress.json", "manifest.json"}
        tensors = checkpoints.read_tensors(state / "checkpoints" / kept[0])
        moments = [name for name in tensors["optimizer"] if name.endswith(("exp_avg_sq", ".v"))]
        assert len(moments) == len(tensors["adapter"])


def test_without_seconds_no_checkpoint_is_written(tmp_path, tiny):
    run = tiny_problem.settings(tmp_path, tiny, "torch", "none")
    training.run(run, loader("torch"))
    assert not Path(run["state_folder"], "checkpoints").exists()


def test_the_scale_of_float16_gradients_goes_on():
    before, after = LossScale.for_dtype("float16"), LossScale.for_dtype("float16")
    before.skips(False)
    for _ in range(7):
        before.skips(True)
    after.restore(before.as_arrays())
    assert after == before


# --- which checkpoint


IDENTITY = {"learning_rate": 0.01, "examples_sha256": "a" * 64, "model_sha256": "b" * 64}


@pytest.fixture
def state(tmp_path):
    """A state folder after step 3, with checkpoints after steps 2 and 3."""
    for step in (1, 2, 3):
        arrays = {"adapter": {"a": np.full((4, 4), step, np.float32)}}
        checkpoints.write(tmp_path / "checkpoints", step, IDENTITY, arrays, {"shapes": []})
    lines = [{"step": step, "loss": 1.0, "token_accuracy": 0.5} for step in (1, 2, 3, 4)]
    others = "learning_rate grad_norm seconds tokens supervised_tokens padded_tokens device_bytes"
    others = dict.fromkeys(others.split(), 1)
    text = "".join(json.dumps({**line, **others}) + "\n" for line in lines)
    (tmp_path / "steps.jsonl").write_text(text)
    (tmp_path / "memory.jsonl").write_bytes(b'{"seconds": 3}\n{"seco\n\0\0\n{"seconds": 4')
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    return tmp_path


def chosen(state, identity=IDENTITY):
    folder = launch.prepare_state(state, identity)
    return folder and Path(folder).name


def test_a_run_goes_on_from_the_last_checkpoint_and_keeps_what_belongs_to_it(state, capsys):
    assert chosen(state) == "step-000003"
    assert "going on from the checkpoint after step 3" in capsys.readouterr().out
    assert (state / "steps.jsonl").exists()
    assert (state / "memory.jsonl").read_text() == '{"seconds":3}\n', "the torn lines are gone"
    assert not (state / "result.json").exists()
    assert not (state / "adapter").exists()


def damaged(state, case):
    last = state / "checkpoints/step-000003"
    tensors = last / "adapter.safetensors"
    if case == "no manifest":
        (last / "manifest.json").unlink()
    elif case == "half a manifest":
        (last / "manifest.json").write_text('{"files": {"ad')
    elif case == "a flipped bit":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif case == "cut short":
        os.truncate(tensors, 50)
    elif case == "a file is gone":
        tensors.unlink()
    elif case == "an empty folder":
        shutil.rmtree(last)
        last.mkdir()
    elif case == "no object":
        (last / "manifest.json").write_text("[]")
    elif case == "another format":
        progress = json.loads((last / "progress.json").read_text())
        shutil.rmtree(last)
        checkpoints.FORMAT, before = 99, checkpoints.FORMAT
        checkpoints.write(state / "checkpoints", 3, IDENTITY, {}, {"shapes": progress["shapes"]})
        checkpoints.FORMAT = before


@pytest.mark.parametrize(
    "case",
    [
        "no manifest",
        "half a manifest",
        "a flipped bit",
        "cut short",
        "a file is gone",
        "an empty folder",
        "no object",
        "another format",
    ],
)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(state, case, capsys):
    damaged(state, case)
    assert chosen(state) == "step-000002"
    said = capsys.readouterr().out
    assert "checkpoint step-000003 is damaged: " in said
    assert "going on from the checkpoint after step 2" in said


def test_with_no_good_checkpoint_a_run_starts_clean_and_says_so(state, capsys):
    for number in (2, 3):
        (state / f"checkpoints/step-00000{number}/manifest.json").unlink()
    assert chosen(state) is None
    assert "starting from the first step" in capsys.readouterr().out
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 0.02}, "learning_rate was 0.01, is 0.02"),
        ({"examples_sha256": "c" * 64}, "examples_sha256 was aaaaaaaaaaaa…, is cccccccccccc…"),
        ({"model_sha256": "c" * 64}, "model_sha256 was bbbbbbbbbbbb…, is cccccccccccc…"),
        ({"new_setting": True}, "new_setting was None, is True"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(state, change, said, capsys):
    assert chosen(state, {**IDENTITY, **change}) is None
    output = capsys.readouterr().out
    assert f"checkpoint step-000003 is of another run: {said}" in output
    assert "starting from the first step" in output
    assert not (state / "steps.jsonl").exists()
    assert not (state / "checkpoints").exists()


def test_a_checkpoint_without_the_lines_of_its_steps_is_refused(state, capsys):
    lines = (state / "steps.jsonl").read_text().splitlines(keepends=True)
    (state / "steps.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    assert chosen(state) == "step-000002", "the one before needs two lines only"
    (state / "steps.jsonl").unlink()
    assert chosen(state) is None
    assert "has lost the lines of its steps" in capsys.readouterr().out


def test_the_first_start_says_nothing(tmp_path, capsys):
    assert launch.prepare_state(tmp_path, IDENTITY) is None
    assert capsys.readouterr().out == ""


# --- killed for real


def real_job(folder, model, engine, name, **limits):
    """A job whose child is a real trainer, with the settings of a tiny problem."""
    run = settings(folder, model, engine, name)
    job = Job(folder / name, "", limits={"checkpoint_seconds": 0, **limits}, grace_seconds=20)
    paths = ("model_folder", "initial_adapter", "train_file", "val_file")
    made = (
        "state_folder",
        "fingerprints",
        "identity",
        "checkpoint_seconds",
        "resume",
        "head_chunk",
    )
    job.arguments |= {key: run[key] for key in paths}
    job.arguments |= {
        "trainer": f"workflow_scripts.lib.{engine}_lora",
        "settings": {
            **{key: value for key, value in run.items() if key not in (*paths, *made)},
            "optimizer_steps": 40,
            "engine_installed": True,
        },
    }
    job.write()
    return job


def published(job):
    return outcome({"state_folder": str(job.folder / "out")})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny):
    """What both engines publish when nobody kills them."""
    jobs = {}
    for engine in ENGINES:
        jobs[engine] = real_job(tmp_path_factory.mktemp(engine), tiny, engine, "whole")
        exit_code, said = jobs[engine].run()
        assert exit_code == 0, said
    return {engine: published(job) for engine, job in jobs.items()}


@pytest.mark.parametrize(
    ("engine", "who"),
    [("torch", "parent"), ("torch", "ctrl-c"), ("mlx", "child")],
)
def test_after_a_kill_the_same_job_ends_as_if_nothing_had_happened(
    tmp_path, tiny, uninterrupted, engine, who
):
    job = real_job(tmp_path, tiny, engine, "killed")
    running = job.start()
    live = job.state / "steps.jsonl"
    wait_until(lambda: live.is_file() and live.read_bytes().count(b"\n") >= 6, seconds=120)
    (child,) = psutil.Process(running.pid).children()
    if who == "child":
        child.kill()
    else:
        running.send_signal(signal.SIGKILL if who == "parent" else signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode != 0
    wait_until(lambda: not child.is_running())
    assert job.row is None
    steps = [json.loads(line)["step"] for line in live.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert 6 <= len(steps) < 40, "it was over before it could be killed"
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert step_gone_on_from(said) >= len(steps) - 1
    assert_same(published(job), uninterrupted[engine])
    assert (job.row["resumed"], job.row["last_step"]) == (1, 40)
    assert not (job.state / "checkpoints").exists(), "of no use any more"


def step_gone_on_from(said):
    return int(said.split("going on from the checkpoint after step ")[1].split()[0])


def test_a_training_that_timed_out_goes_on_when_it_is_tried_again(tmp_path, tiny):
    job = real_job(tmp_path, tiny, "torch", "slow", timeout_seconds=10)
    job.arguments["settings"]["optimizer_steps"] = 5000
    job.write()
    exit_code, said = job.run()
    assert exit_code == 0, said
    first = job.row
    assert first["status"] == "timeout", first["reason"]
    assert first["last_step"] > 1
    assert first["tokens_per_s"] > 0
    assert first["val_loss_before"] > 0
    assert first["val_loss"] is None
    assert first["dtype"] == "float32"
    assert first["peak_process_bytes"] > 0
    assert f"after step {first['last_step']} of 5000; try micro_batch 1" in first["reason"]
    exit_code, said = job.run()
    assert exit_code == 0, said
    assert f"going on from the checkpoint after step {first['last_step']}" in said
    second = job.row
    assert second["last_step"] > first["last_step"]
    assert second["wall_seconds"] > first["wall_seconds"]
    assert second["started_at"] == first["started_at"]
    seconds = [sample["seconds"] for sample in job.samples()]
    assert seconds == sorted(seconds)
