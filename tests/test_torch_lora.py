import hashlib
import json
import os

import pytest

from workflow_scripts.lib import (
    batches,
    measure,
    recorder,
    tiny_problem,
    torch_lora,
    torch_loss,
    torch_trainer,
    training,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_problem.make_model(tmp_path_factory.mktemp("torch") / "model")


@pytest.fixture(scope="module")
def base(tiny_folder):
    """Load the plain model anew at each call."""
    import torch
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def lora(tiny_folder, base):
    """A model whose adapters do something."""
    import torch

    torch.manual_seed(0)
    config = tiny_problem.model_config(tiny_folder)
    model = torch_lora.add_adapters(
        base(), config, rank=8, alpha=16, start=tiny_problem.start(tiny_folder)
    )
    with torch.no_grad():
        for module in torch_lora.adapters(model).values():
            module.lora_B["default"].weight.normal_(0, 0.05)
    return model


@pytest.fixture
def batch(tmp_path):
    rows = tiny_problem.write_rows(tmp_path / "rows.jsonl", tiny_problem.make_rows(3))
    examples = batches.read_examples(rows, tiny_problem.CONTEXT)
    return batches.make_batch(examples, [0, 1, 2], tiny_problem.CONTEXT, chunk=16)


def stock_loss(model, batch):
    """The summed loss by full logits and shifted labels, padding masked."""
    import torch

    labels = torch.full(batch.input_ids.shape, -100)
    real = torch.from_numpy(batch.weights == 1)
    places = torch.from_numpy(batch.positions).long()[real] + 1
    labels.view(-1)[places] = torch.from_numpy(batch.targets).long()[real]
    logits = model(torch.from_numpy(batch.input_ids).long()).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()
    return loss, right


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


def test_loss_and_gradients_equal_those_of_full_logits(lora, batch):
    import torch

    wanted, right = stock_loss(lora, batch)
    wanted.backward()
    expected = gradients(lora)
    loss, correct = torch_loss.batch_loss(lora, *torch_loss.to_device(batch, "cpu"))
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert correct.item() == right.item()
    for name, gradient in gradients(lora).items():
        assert torch.linalg.norm(gradient - expected[name]) < 1e-4 * torch.linalg.norm(
            expected[name]
        ), name


def test_no_array_holds_more_of_the_vocabulary_than_one_chunk(lora, batch):
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            shape = tuple(getattr(out, "shape", ()))
            head = (tiny_problem.VOCABULARY, 64)
            if tiny_problem.VOCABULARY in shape and shape not in (head, head[::-1]):
                largest = max(largest, out.numel())
            return out

    with Watch():
        loss, _ = torch_loss.batch_loss(lora, *torch_loss.to_device(batch, "cpu"))
        loss.backward()
    lora.zero_grad()
    assert batch.supervised > 2 * 16
    assert largest == 16 * tiny_problem.VOCABULARY


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("mps", False), ("cuda", True)])
def test_loader_arguments_by_device(tmp_path, tiny_folder, device, pinned):
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch")
    arguments = torch_trainer.sft_arguments(device, run, str(tmp_path))
    assert arguments["dataloader_pin_memory"] is pinned
    assert arguments["dataloader_num_workers"] == 0
    assert arguments["use_cpu"] is (device == "cpu")
    assert arguments["gradient_accumulation_steps"] == 2
    assert arguments["logging_nan_inf_filter"] is False
    assert arguments["train_sampling_strategy"] == "sequential"


def test_a_run_learns_and_its_adapter_loads_in_peft(tmp_path, tiny_folder, base):
    import torch
    from peft import PeftModel

    run = tiny_problem.settings(tmp_path, tiny_folder, "torch", optimizer_steps=12)
    result = training.run(run, torch_lora.load)
    assert result["status"] == "ok"
    assert result["val_loss"] < result["val_loss_before"]
    assert result["last_step"] == 12 == len(tiny_problem.steps_of(run))
    assert json.loads((tmp_path / "torch-run" / "result.json").read_text()) == result
    assert result["versions"].keys() >= {"torch", "trl", "peft", "transformers"}

    loaded = PeftModel.from_pretrained(base(), tmp_path / "torch-run" / "adapter")
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    examples = batches.read_examples(run["val_file"], tiny_problem.CONTEXT)
    rows = list(batches.evaluation_batches(examples, tiny_problem.CONTEXT, 32, 3))
    loss, correct = torch_loss.evaluate(loaded, "cpu", rows)
    assert loss / result["val_tokens"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert correct / result["val_tokens"] == result["val_token_accuracy"]


def test_micro_batches_and_checkpointing_change_no_step(tmp_path, tiny_folder):
    losses = []
    for name, changes in {
        "1x4": {"micro_batch": 1},
        "2x2": {"micro_batch": 2},
        "4x1": {"micro_batch": 4},
        "checkpointed": {"micro_batch": 4, "gradient_checkpointing": True},
    }.items():
        run = tiny_problem.settings(tmp_path, tiny_folder, "torch", name, epsilon=1e-6, **changes)
        assert training.run(run, torch_lora.load)["status"] == "ok"
        losses.append([step["loss"] for step in tiny_problem.steps_of(run)])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_bfloat16_weights_keep_float32_adapters(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch", dtype="bfloat16")
    result = training.run(run, torch_lora.load)
    assert (result["status"], result["dtype"]) == ("ok", "bfloat16")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "torch-run" / "adapter" / "adapter_model.safetensors")
    assert {str(value.dtype) for value in saved.values()} == {"torch.float32"}


def test_loss_scaling_changes_no_step_and_an_overflow_is_skipped(tmp_path, tiny_folder, base):
    config = tiny_problem.model_config(tiny_folder)
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch")
    examples = batches.read_examples(run["train_file"], tiny_problem.CONTEXT)
    plan = batches.Plan(
        batches.row_order(examples.lengths, 3, 4, 2, 0),
        lambda rows: batches.make_batch(examples, rows, tiny_problem.CONTEXT, 32),
    )
    losses, skipped = {}, {}
    for case in ("float32", "float16", "overflow"):
        model = torch_lora.add_adapters(base(), config, 8, 16, tiny_problem.start(tiny_folder))
        if case == "overflow":
            first = next(p for p in model.parameters() if p.requires_grad)
            first.register_hook(_infinite_once())
        with measure.steps_file(tmp_path / f"{case}.jsonl") as file:
            steps = recorder.Recorder(file)
            dtype = "float32" if case == "float32" else "float16"
            memory = measure.TorchMemory("cpu")
            torch_trainer.train(model, run, "cpu", dtype, memory, plan, steps)
        losses[case] = [step.loss for step in steps.steps]
        skipped[case] = [step.step for step in steps.steps if step.grad_norm is None]
    assert losses["float16"] == losses["float32"]
    assert skipped == {"float32": [], "float16": [], "overflow": [1]}
    assert len(losses["overflow"]) == 3


def _infinite_once():
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * float("inf") if len(calls) == 1 else gradient

    return hook


def test_a_run_that_diverges_stops_at_that_step(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch", learning_rate=1e30, warmup_steps=0)
    result = training.run(run, torch_lora.load)
    assert result["status"] == "diverged"
    assert result["reason"].startswith(f"step {result['last_step'] + 1}: loss ")
    assert result["last_step"] < 3
    assert result["val_loss"] is None
    assert (tmp_path / "torch-run" / "adapter" / "adapter_model.safetensors").exists()


def test_a_missing_token_count_is_an_error_not_a_mean_of_means():
    trainer = object.__new__(torch_trainer.trainer_class())
    with pytest.raises(RuntimeError, match="num_items_in_batch is missing"):
        trainer.compute_loss(None, {})


def test_quantized_weights_and_missing_devices(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch", bits=4)
    with pytest.raises(ValueError, match="bits"):
        training.run(run, torch_lora.load)
    assert not (tmp_path / "torch-run" / "result.json").exists()
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch", device="mps")
    if torch_lora.probe("mps")["mps"]:
        pytest.skip("this machine has the device")
    result = training.run(run, torch_lora.load)
    assert result == {"status": "unavailable", "reason": "torch finds no mps here, only cpu"}


def test_examples_of_another_tokenizer_are_refused(tmp_path, tiny_folder):
    run = tiny_problem.settings(tmp_path, tiny_folder, "torch")
    (tmp_path / "stats.json").write_text('{"tokenizer_sha256": "0123456789abcdef"}')
    with pytest.raises(ValueError, match="made with the tokenizer 0123456789ab"):
        training.run(run, torch_lora.load)
    tokenizer = hashlib.sha256((tiny_folder / "tokenizer.json").read_bytes()).hexdigest()
    (tmp_path / "stats.json").write_text(json.dumps({"tokenizer_sha256": tokenizer}))
    training.check_tokenizer(run["train_file"], run["model_folder"])
