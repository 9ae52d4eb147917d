import json
import time

import pytest

from workflow_scripts.lib import measure


def step(number, seconds, new_shape=False, tokens=100, flops=256.0):
    return measure.Step(
        step=number,
        loss=1.0,
        token_accuracy=0.5,
        learning_rate=1e-3,
        grad_norm=1.0,
        seconds=seconds,
        tokens=tokens,
        supervised_tokens=25,
        padded_tokens=128,
        device_bytes=None,
        new_shape=new_shape,
        flops=flops,
    )


def test_rates_leave_out_first_shapes_and_fit_together():
    steps = [step(1, 9.0, True), step(2, 1.0), step(3, 5.0, True), step(4, 3.0), step(5, 2.0)]
    summary = measure.summarize_steps(steps, micro_batches=2, sequences=4)
    assert summary["optimizer_steps"] == 5
    assert summary["train_seconds"] == 20.0
    assert summary["optimizer_steps_per_s"] == pytest.approx(3 / 6)
    assert summary["micro_batches_per_s"] == pytest.approx(6 / 6)
    assert summary["sequences_per_s"] == pytest.approx(12 / 6)
    assert summary["tokens_per_s"] == pytest.approx(300 / 6)
    assert summary["supervised_tokens_per_s"] == pytest.approx(75 / 6)
    assert summary["padded_tokens_per_s"] == pytest.approx(3 * 128 / 6)
    assert summary["flops_per_token"] == 256 / 128
    assert summary["step_seconds_p50"] == 2.0
    assert summary["step_seconds_p95"] == pytest.approx(2.9)
    assert summary["compile_seconds"] == pytest.approx(7.0 + 3.0)
    assert summary["trained_tokens"] == 500
    assert summary["trained_supervised_tokens"] == 125


def test_no_rate_is_made_up_when_every_step_saw_a_new_shape():
    summary = measure.summarize_steps([step(1, 2.0, True)], 1, 1)
    assert summary["tokens_per_s"] is None
    assert summary["step_seconds_p50"] is None
    assert summary["compile_seconds"] is None
    assert summary["flops_per_token"] is None
    assert summary["train_seconds"] == 2.0
    assert measure.summarize_steps([], 1, 1)["optimizer_steps"] == 0


def test_clock_waits_for_the_device():
    clock = measure.StepClock(lambda: time.sleep(0.05))
    clock.start()
    assert clock.stop() >= 0.05
    with pytest.raises(RuntimeError):
        clock.stop()


def test_steps_are_on_disk_at_once_and_the_file_starts_anew(tmp_path):
    path = tmp_path / "state" / "steps.jsonl"
    for _ in range(2):
        with measure.steps_file(path) as file:
            measure.write_step(file, step(1, 0.5))
            lines = path.read_text().splitlines()
            assert len(lines) == 1
    assert json.loads(lines[0]).keys() == set(measure.Step._fields)


def test_a_step_that_is_not_finite_is_never_written_as_nan(tmp_path):
    with measure.steps_file(tmp_path / "s.jsonl") as file, pytest.raises(ValueError, match="JSON"):
        measure.write_step(file, step(1, float("nan")))


def test_fingerprints_see_contents_not_names(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (measure.sha256_of([tmp_path / name]) for name in "abc")
    assert a == b != c
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        measure.model_sha256(tmp_path)


def test_versions_skip_what_is_not_installed():
    found = measure.versions(["numpy", "surely-not-installed-anywhere"])
    assert set(found) == {"python", "numpy"}


def test_torch_on_cpu_has_no_device_counters():
    assert measure.TorchMemory("cpu").sample() == (None, None, None)


def test_mlx_counters():
    memory = measure.mlx_memory()
    assert memory.peak >= 0
    assert memory.reserved >= memory.peak
