import json
import os
import subprocess
import sys

import numpy as np
import pytest

from workflow_scripts.lib import (
    batches,
    mlx_loop,
    mlx_lora,
    mlx_loss,
    tiny_model,
    tiny_problem,
    training,
)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_problem.make_model(tmp_path_factory.mktemp("mlx") / "model")


@pytest.fixture(scope="module")
def tiny_4bit(tiny_folder):
    return tiny_problem.quantize(tiny_folder, tiny_folder.parent / "model-4bit")


def loaded(folder):
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    config, start = tiny_problem.model_config(folder), tiny_problem.start(folder)
    mlx_lora.add_adapters(model, config, rank=8, alpha=16, start=start)
    mx.random.seed(1)
    for module in mlx_lora.adapters(model).values():
        module.lora_b = mx.random.normal(module.lora_b.shape) * 0.05
    return model


def rows(tmp_path, count=3, chunk=16):
    path = tiny_problem.write_rows(tmp_path / "rows.jsonl", tiny_problem.make_rows(count))
    examples = batches.read_examples(path, tiny_problem.CONTEXT)
    return batches.make_batch(examples, range(count), tiny_problem.CONTEXT, chunk)


def test_loss_and_gradients_equal_those_of_full_logits(tmp_path, tiny_folder):
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten

    batch, model = rows(tmp_path), loaded(tiny_folder)
    arrays = mlx_loss.to_device(batch)
    real = np.flatnonzero(batch.weights.reshape(-1))
    positions = mx.array(batch.positions.reshape(-1)[real])
    targets = mx.array(batch.targets.reshape(-1)[real])

    def stock(model):
        logits = model(arrays[0]).reshape(-1, tiny_problem.VOCABULARY)[positions]
        return nn.losses.cross_entropy(logits, targets, reduction="sum")

    wanted, expected = nn.value_and_grad(model, stock)(model)
    expected = dict(tree_flatten(expected))
    (_, loss, _), found = nn.value_and_grad(model, lambda m: mlx_loss.batch_loss(m, *arrays))(model)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, gradient in tree_flatten(found):
        assert mx.linalg.norm(gradient - expected[name]) < 1e-4 * mx.linalg.norm(expected[name])


def test_memory_of_the_head_is_that_of_chunks(tmp_path):
    """A vocabulary of 16,384 at 3 x 128 positions would take 25 MB in float32 for logits alone."""
    import mlx.core as mx
    from mlx.utils import tree_map

    folder = tiny_problem.make_model(tmp_path / "wide")
    tiny_model.write_weights(
        folder, 1, 0, vocab_size=16384, hidden_size=64, intermediate_size=128, num_hidden_layers=1
    )
    path = tiny_problem.write_rows(
        tmp_path / "full.jsonl",
        [{"input_ids": [5] * 128, "labels": [-100] + [5] * 127}] * 3,
    )
    examples = batches.read_examples(path, 128)
    model = loaded(folder)
    parameters = model.trainable_parameters()
    zero = (mx.array(0.0), mx.array(0.0), tree_map(mx.zeros_like, parameters))
    mx.eval(model.parameters(), zero)
    peaks = {}
    for chunk in (8, 384):
        batch = batches.make_batch(examples, range(3), 128, chunk)
        step, arrays = mlx_loop.micro_step(model), mlx_loss.to_device(batch)
        mx.eval(arrays)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(step(parameters, zero, mx.array(1.0), *arrays))
        peaks[chunk] = mx.get_peak_memory() - before
    logits = 381 * 16384 * 4
    assert peaks[384] > logits
    assert peaks[8] < logits / 2


@pytest.mark.parametrize("bits", [None, 4])
def test_a_run_learns_and_its_adapter_loads_in_mlx_lm(tmp_path, tiny_folder, tiny_4bit, bits):
    import mlx_lm

    folder = tiny_4bit if bits else tiny_folder
    run = tiny_problem.settings(tmp_path, folder, "mlx", bits=bits, optimizer_steps=12)
    result = training.run(run, mlx_lora.load)
    assert result["status"] == "ok"
    assert result["val_loss"] < result["val_loss_before"]
    assert result["last_step"] == 12 == len(tiny_problem.steps_of(run))
    assert json.loads((tmp_path / "mlx-run" / "result.json").read_text()) == result
    assert result["peak_device_bytes"] > 0
    assert result["load_peak_bytes"] > 0

    model, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path / "mlx-run" / "adapter"))
    examples = batches.read_examples(run["val_file"], tiny_problem.CONTEXT)
    made = list(batches.evaluation_batches(examples, tiny_problem.CONTEXT, 32, 3))
    loss, correct = mlx_loss.evaluate(model, made)
    assert loss / result["val_tokens"] == pytest.approx(result["val_loss"], rel=1e-4)
    assert correct / result["val_tokens"] == pytest.approx(result["val_token_accuracy"], abs=0.01)


def test_micro_batches_and_checkpointing_change_no_step(tmp_path, tiny_folder):
    losses = []
    for name, changes in {
        "1x4": {"micro_batch": 1},
        "2x2": {"micro_batch": 2},
        "4x1": {"micro_batch": 4},
        "checkpointed": {"micro_batch": 4, "gradient_checkpointing": True},
    }.items():
        run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", name, epsilon=1e-6, **changes)
        assert training.run(run, mlx_lora.load)["status"] == "ok"
        losses.append([step["loss"] for step in tiny_problem.steps_of(run)])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_checkpointing_leaves_other_models_alone(tiny_folder):
    one, other = loaded(tiny_folder), loaded(tiny_folder)
    plain = type(other.layers[0])
    mlx_lora.checkpoint_layers(one)
    assert type(one.layers[0]) is not plain
    assert type(other.layers[0]) is plain
    assert plain.__call__.__qualname__ == "TransformerBlock.__call__"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_weights_keep_float32_adapters(tmp_path, tiny_folder, dtype):
    import mlx.core as mx

    small = {"optimizer_steps": 1, "effective_batch": 1, "micro_batch": 1}
    run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", dtype=dtype, **small)
    result = training.run(run, mlx_lora.load)
    assert (result["status"], result["dtype"], result["skipped_steps"]) == ("ok", dtype, 0)
    saved = mx.load(str(tmp_path / "mlx-run" / "adapter" / "adapters.safetensors"))
    assert {value.dtype for value in saved.values()} == {mx.float32}


def test_published_recipe_is_plain_adam_at_a_constant_rate(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", recipe="published")
    training.run(run, mlx_lora.load)
    assert {step["learning_rate"] for step in tiny_problem.steps_of(run)} == {1e-2}


def test_a_run_that_diverges_stops_at_that_step(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", learning_rate=1e30, warmup_steps=0)
    result = training.run(run, mlx_lora.load)
    assert result["status"] == "diverged"
    assert result["reason"].startswith(f"step {result['last_step'] + 1}: loss ")
    assert result["last_step"] < 3
    assert (tmp_path / "mlx-run" / "adapter" / "adapters.safetensors").exists()


def test_weights_that_overflow_diverge_before_the_first_step(tmp_path, tiny_folder):
    import mlx.core as mx

    folder = tmp_path / "broken"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("inf")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    run = tiny_problem.settings(tmp_path, folder, "mlx")
    result = training.run(run, mlx_lora.load)
    assert (result["status"], result["last_step"]) == ("diverged", 0)
    assert result["reason"].startswith("validation before training: loss nan")
    assert tiny_problem.steps_of(run) == []


def test_weights_of_other_bits_than_asked_for_are_refused(tmp_path, tiny_folder, tiny_4bit):
    run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", bits=4)
    with pytest.raises(ValueError, match="weights of 16 bits, but the run asks for 4"):
        training.run(run, mlx_lora.load)
    run = tiny_problem.settings(tmp_path, tiny_4bit, "mlx")
    with pytest.raises(ValueError, match="weights of 4 bits, but the run asks for 16"):
        training.run(run, mlx_lora.load)


@pytest.mark.parametrize("has_parent", [False, True])
def test_from_the_command_line_with_and_without_a_parent(tmp_path, tiny_folder, has_parent):
    run = tiny_problem.settings(tmp_path, tiny_folder, "mlx", optimizer_steps=1)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(run))
    environment = {**os.environ, "FINETUNE_PARENT": "1" if has_parent else "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "workflow_scripts.lib.mlx_lora", str(file)],
        stdin=subprocess.DEVNULL,
        env=environment,
        capture_output=True,
        text=True,
    )
    # /dev/null is at its end at once: for a child that has a parent this means that it is gone.
    assert ended.returncode == (75 if has_parent else 0), ended.stderr
    assert (tmp_path / "mlx-run" / "result.json").exists() is not has_parent
    if not has_parent:
        assert "step 1 of 1: loss" in ended.stdout
