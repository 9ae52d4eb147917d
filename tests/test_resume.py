"""A training that is cut off goes on from its last checkpoint as if nothing had happened."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from workflow_scripts.lib import checkpoints, tiny_problem, training
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
    found = checkpoints.latest(Path(run["state_folder"], "checkpoints"), run["identity"])
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
