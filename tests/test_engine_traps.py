"""Traps of the engines that a CPU can show: the stock engine steps into each, ours doesn't.

Where another file shows our side already, only the stock engine's is here.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import conversation_maker as make
import numpy as np
import pytest
from test_masking import encoded

from workflow_scripts.lib import (
    batches,
    guard,
    masking,
    measure,
    mlx_loop,
    mlx_lora,
    mlx_loss,
    recipe,
    recorder,
    tiny_problem,
    torch_lora,
    torch_loss,
    torch_trainer,
    training,
)
from workflow_scripts.lib.batches import IGNORED

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENGINES = {"torch": torch_lora.load, "mlx": mlx_lora.load}
LENGTHS = (14, 37, 21, 60, 9)  # no two rows share one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traps") / "model"
    return tiny_problem.make_model(folder, num_hidden_layers=1)


def row(ids, *spans):
    """A row whose tokens from start up to before stop of each span are supervised."""
    ids = [int(token) for token in ids]
    labels = [IGNORED] * len(ids)
    for start, stop in spans:
        labels[start:stop] = ids[start:stop]
    return {"input_ids": ids, "labels": labels}


def uneven_rows():
    """Rows of one span up to their end, from one token to all but one: means of rows mislead.

    The model repeats a 17 by itself, so that it is right on two of them.
    """
    shares = (0.9, 0.05, 0.5, 0.98, 0.2)
    return [
        row(np.arange(length) * step % 40 + 17, (length - max(1, int(length * share)), length))
        for length, share, step in zip(LENGTHS, shares, (0, 3, 1, 7, 0), strict=True)
    ]


def settings(folder, model, engine, rows, **changes):
    for split in ("train", "val"):
        tiny_problem.write_rows(folder / f"{split}.jsonl", rows)
    return tiny_problem.settings(folder, model, engine, **changes)


def batch_of(folder, rows, pad=0, chunk=32):
    path = tiny_problem.write_rows(folder / "rows.jsonl", rows)
    examples = batches.read_examples(path, tiny_problem.CONTEXT)
    return batches.make_batch(examples, range(len(rows)), tiny_problem.CONTEXT, chunk, pad)


class Run(NamedTuple):
    """A run of ours, and what was seen of it on the way."""

    settings: dict
    result: dict
    order: np.ndarray  # row numbers as planned
    rows: list[list[int]]  # row numbers of each micro-batch as the engine asked for them
    trainer: object  # TRL's, under torch

    @property
    def adapter(self):
        from safetensors.numpy import load_file

        folder = f"{self.settings['state_folder']}/adapter"
        name = {"torch": "adapter_model", "mlx": "adapters"}[self.settings["engine"]]
        return load_file(f"{folder}/{name}.safetensors")

    @property
    def adapter_config(self):
        with open(f"{self.settings['state_folder']}/adapter/adapter_config.json") as file:
            return json.load(file)


def watched(run):
    """Run ours from start to end, keeping its plan, what it asks for, and TRL's trainer."""
    orders, asked, trainers = [None], [], [None]

    def load(settings, config):
        engine = ENGINES[run["engine"]](settings, config)

        def train(plan, steps, start):
            def batch(rows):
                asked.append([int(row) for row in rows])
                return plan.batch(rows)

            orders.append(plan.order)
            engine.train(plan._replace(batch=batch), steps, start)

        return engine._replace(train=train)

    class Kept(torch_trainer.trainer_class()):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_trainer, "trainer_class", lambda: Kept)
        result = training.run(run, load)
    return Run(run, result, orders[-1], asked, trainers[-1])


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Both engines over the same 24 rows of many lengths, into a second epoch."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        engine: watched(tiny_problem.settings(folder, tiny, engine, optimizer_steps=8))
        for engine in ENGINES
    }


def torch_base(folder, dtype="float32"):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def torch_model(folder, dtype="float32"):
    config, start = tiny_problem.model_config(folder), tiny_problem.start(folder)
    return torch_lora.add_adapters(torch_base(folder, dtype), config, 8, 16, start)


def stock_trainer(model, tokenizer_folder, folder, rows, eval_rows=None, **changes):
    """TRL's SFTTrainer as shipped, but for what keeps it quiet and on the CPU."""
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    options = {
        "output_dir": str(folder / "stock"),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,  # or the CPU too computes in 16 bit
        **changes,
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(**options),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(eval_rows) if eval_rows else None,
        processing_class=AutoTokenizer.from_pretrained(tokenizer_folder),
    )


def mlx_model(folder):
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    config, start = tiny_problem.model_config(folder), tiny_problem.start(folder)
    mlx_lora.add_adapters(model, config, rank=8, alpha=16, start=start)
    return model


def stock_batch(row):
    """A row with one span up to its end, as mlx-lm's own loss takes it; no padding."""
    import mlx.core as mx

    ids = row["input_ids"]
    return mx.array([ids]), mx.array([[row["labels"].count(IGNORED), len(ids)]])


def stock_training(model, folder, rows, iters, val_rows=(), **changes):
    """mlx-lm's own `train` with plain gradient descent on the rows in their order; return what it
    reported of validation.
    """
    from mlx import optimizers
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback

    reports = []

    class Listener(TrainingCallback):
        def on_val_loss_report(self, info):
            reports.append(info)

    def given(dataset, loop=False, **_):
        return itertools.cycle(dataset) if loop else iter(dataset)

    trainer.train(
        model,
        optimizers.SGD(1.0),
        [stock_batch(row) for row in rows],
        [stock_batch(row) for row in val_rows],
        trainer.TrainingArgs(
            iters=iters, batch_size=1, adapter_file=str(folder / "a.safetensors"), **changes
        ),
        iterate_batches=given,
        training_callback=Listener(),
    )
    return reports


def calls_to(name, action, *args, **options):
    """How often a function of MLX is called during an action."""
    import mlx.core as mx

    function, calls = getattr(mx, name), []

    def counted(*given):
        calls.append(name)
        return function(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, name, counted)
        action(*args, **options)
    return len(calls)


def trained_b(model):
    """The B matrices of an MLX model, end to end."""
    return np.concatenate([np.array(m.lora_b).ravel() for m in mlx_lora.adapters(model).values()])


def gradient_of_b(model, batch):
    """Gradient of the summed loss with respect to them, by ours."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    parameters = model.trainable_parameters()
    sums = (mx.array(0.0), mx.array(0.0), tree_map(mx.zeros_like, parameters))
    sums = mlx_loop.micro_step(model)(parameters, sums, mx.array(1.0), *mlx_loss.to_device(batch))
    found = dict(tree_flatten(sums[2]))
    names = mlx_lora.adapters(model)
    return np.concatenate([np.array(found[f"{name}.lora_b"]).ravel() for name in names])


def by_full_logits(folder, rows):
    """(summed loss, right predictions, supervised tokens) of each row alone, without our code."""
    import torch
    from torch.nn import functional

    model, found = torch_base(folder), []
    for each in rows:
        labels = torch.tensor(each["labels"])[1:]
        with torch.no_grad():
            logits = model(torch.tensor([each["input_ids"]])).logits[0, :-1]
        loss = functional.cross_entropy(logits, labels, reduction="sum").item()
        right = int((logits.argmax(-1) == labels).sum())
        found.append((loss, right, int((labels != IGNORED).sum())))
    return np.array(found).T


def evaluated(folder, model, engine, rows, pad=0, micro_batch=2):
    """Summed loss and right predictions of all rows, by an engine of ours before any training."""
    run = settings(folder, model, engine, rows)
    examples = batches.read_examples(run["val_file"], tiny_problem.CONTEXT)
    engine = ENGINES[engine](run, tiny_problem.model_config(model))
    return engine.evaluate(
        batches.evaluation_batches(examples, tiny_problem.CONTEXT, 32, micro_batch, pad)
    )


def test_both_engines_get_the_rows_of_the_plan_in_its_order(runs):
    torch, mlx = runs["torch"], runs["mlx"]
    assert (
        torch.rows
        == mlx.rows
        == torch.order.reshape(-1, 2).tolist()
        == mlx.order.reshape(-1, 2).tolist()
    )
    counts = Counter(itertools.chain(*torch.rows))
    assert counts.keys() == set(range(24))
    assert set(counts.values()) == {1, 2}


def test_no_row_loses_a_token_or_a_label_on_the_way(runs):
    for run in runs.values():
        examples = batches.read_examples(run.settings["train_file"], tiny_problem.CONTEXT)
        steps = tiny_problem.steps_of(run.settings)
        for step, rows in zip(steps, run.order.reshape(8, 4), strict=True):
            labels = [examples.row(row)[1] for row in rows]
            assert step["tokens"] == sum(map(len, labels))
            assert step["supervised_tokens"] == sum((each != IGNORED).sum() for each in labels)


def test_the_stock_trainer_shuffles(tmp_path, tiny):
    rows = [row([5 + number] * 4, (1, 4)) for number in range(16)]

    def order(**changes):
        trainer = stock_trainer(
            torch_base(tiny), tiny, tmp_path, rows, per_device_train_batch_size=1, **changes
        )
        return [batch["input_ids"][0, 0].item() - 5 for batch in trainer.get_train_dataloader()]

    assert order(train_sampling_strategy="sequential") == list(range(16))
    assert order() != list(range(16))
    assert sorted(order()) == list(range(16))


def test_trl_supervises_two_tokens_more_in_each_turn(qwen):
    from trl.chat_template_utils import get_training_chat_template

    record = make.record(
        make.user("Hi"), make.assistant("Yes"), make.user("Go"), make.assistant("Run")
    )
    messages, spans = encoded(record, qwen)
    ids, labels = masking.labels_of(spans)
    stock = qwen.tokenizer.apply_chat_template(
        [{key: each[key] for key in ("role", "content")} for each in messages],
        chat_template=get_training_chat_template(qwen.tokenizer),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert stock["input_ids"] == ids
    more = [
        token
        for token, label, masked in zip(ids, labels, stock["assistant_masks"], strict=True)
        if masked and label == IGNORED
    ]
    assert qwen.tokenizer.decode(more) == "\n" * 4
    assert sum(stock["assistant_masks"]) == sum(label != IGNORED for label in labels) + 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_pad_and_end_tokens_of_a_text_count_whatever_is_padded_with(tmp_path, tiny, engine):
    rows = [row([9, 0, 7, 1, 0, 8, 1], (1, 4), (4, 7)), row(range(30, 100), (2, 5))]
    losses, right, tokens = by_full_logits(tiny, rows)
    assert tokens.tolist() == [6, 3]
    for pad in (0, 1, 7):
        batch = batch_of(tmp_path, rows, pad)
        assert batch.input_ids[0, 7:].tolist() == [pad] * 121
        assert batch.targets[batch.weights == 1].tolist() == [0, 7, 1, 0, 8, 1, 32, 33, 34]
        found = evaluated(tmp_path, tiny, engine, rows, pad)
        assert found == (pytest.approx(losses.sum(), rel=1e-5), right.sum())


def test_the_stock_collator_masks_padding_by_its_value(tiny):
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    pad = tokenizer.pad_token_id
    made = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": [9, pad, 7]}])
    assert made["labels"].tolist() == [[9, IGNORED, 7]]


def test_peft_left_alone_adapts_two_linears_of_seven(tiny):
    from peft import LoraConfig, get_peft_model

    stock = get_peft_model(torch_base(tiny), LoraConfig(task_type="CAUSAL_LM"))
    assert {name.rpartition(".")[2] for name in torch_lora.adapters(stock)} == {"q_proj", "v_proj"}
    assert len(torch_lora.adapters(torch_model(tiny))) == 7


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_validation_is_over_tokens_whatever_the_batch(tmp_path, tiny, engine, micro_batch):
    rows = uneven_rows()
    losses, right, _ = by_full_logits(tiny, rows)
    found = evaluated(tmp_path, tiny, engine, rows, micro_batch=micro_batch)
    assert found == (pytest.approx(losses.sum(), rel=1e-5), right.sum())


@pytest.mark.parametrize("batch", [1, 3])
def test_stock_validation_is_the_mean_of_batch_means(tmp_path, tiny, batch):
    rows = uneven_rows()
    losses, right, tokens = by_full_logits(tiny, rows)
    trainer = stock_trainer(
        torch_base(tiny), tiny, tmp_path, rows, rows, per_device_eval_batch_size=batch
    )
    found = trainer.evaluate()
    parts = [slice(start, start + batch) for start in range(0, len(rows), batch)]
    means = [losses[part].sum() / tokens[part].sum() for part in parts]
    accuracies = [right[part].sum() / tokens[part].sum() for part in parts]
    sizes = [len(rows[part]) for part in parts]
    assert found["eval_loss"] == pytest.approx(np.average(means, weights=sizes), rel=1e-4)
    assert found["eval_mean_token_accuracy"] == pytest.approx(np.mean(accuracies), rel=1e-4)
    assert abs(found["eval_loss"] / (losses.sum() / tokens.sum()) - 1) > 0.01
    assert abs(found["eval_mean_token_accuracy"] - right.sum() / tokens.sum()) > 0.01


def test_the_stock_trainer_ignores_a_completion_mask_unless_told_otherwise(tmp_path, tiny):
    rows = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}]

    def labels(**changes):
        return stock_trainer(torch_base(tiny), tiny, tmp_path, rows, **changes).train_dataset[0][
            "labels"
        ]

    assert labels() == [5, 6, 7, 8]
    assert labels(completion_only_loss=True) == [IGNORED, IGNORED, 7, 8]


def test_the_stock_head_scores_every_position_and_ours_the_supervised(tmp_path, tiny):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        scored = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            packet = getattr(function, "overloadpacket", None)
            if packet is torch.ops.aten.mm and out.shape[-1] == tiny_problem.VOCABULARY:
                self.scored += len(out)
            return out

    rows = [row(range(5, 105), (10, 15), (60, 70))]
    trainer = stock_trainer(torch_base(tiny), tiny, tmp_path, rows)
    with Products() as stock:
        trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    batch = batch_of(tmp_path, rows, chunk=3)
    with Products() as ours:
        torch_loss.batch_loss(torch_model(tiny), *torch_loss.to_device(batch, "cpu"))
    assert (stock.scored, ours.scored) == (99, 15)


def test_the_stock_trainer_reports_nan_as_zero_and_trains_on(tmp_path, tiny):
    import torch

    trainer = stock_trainer(
        torch_model(tiny),
        tiny,
        tmp_path,
        uneven_rows(),
        learning_rate=1e30,
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["loss"] for entry in steps[1:]] == [0.0] * 3
    assert all(np.isnan(entry["grad_norm"]) for entry in steps[1:])
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert not any(torch.isfinite(p).all() for p in trained)


@pytest.mark.parametrize("engine", ENGINES)
def test_ours_stops_before_a_loss_that_is_not_finite_reaches_the_adapter(tmp_path, tiny, engine):
    run = watched(
        settings(tmp_path, tiny, engine, uneven_rows(), learning_rate=1e30, warmup_steps=0)
    )
    assert run.result["status"] == "diverged"
    assert len(tiny_problem.steps_of(run.settings)) == run.result["last_step"] == 1
    assert all(np.isfinite(value).all() for value in run.adapter.values())


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model with one word whose vector is not a number, and rows of which one has that word."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned") / "model"
    tiny_problem.make_model(folder, num_hidden_layers=1, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, [*uneven_rows(), row([9, 77, 9, 8], (2, 4))]


def test_stock_validation_drops_what_is_not_finite(tmp_path, tiny, poisoned):
    folder, rows = poisoned

    def loss(eval_rows, **changes):
        trainer = stock_trainer(
            torch_base(folder),
            tiny,
            tmp_path,
            rows,
            eval_rows,
            per_device_eval_batch_size=1,
            **changes,
        )
        return trainer.evaluate()["eval_loss"]

    assert loss(rows) == pytest.approx(loss(rows[:-1]), rel=1e-6)
    assert np.isnan(loss(rows, logging_nan_inf_filter=False))


@pytest.mark.parametrize("engine", ENGINES)
def test_validation_of_ours_never_drops_what_is_not_finite(tmp_path, poisoned, engine):
    folder, rows = poisoned
    result = watched(settings(tmp_path, folder, engine, rows)).result
    assert result["status"] == "diverged"
    assert result["reason"].startswith("validation before training: loss nan")


def test_each_default_of_trl_that_would_change_the_problem_is_said_away(tmp_path, runs):
    from trl import SFTConfig

    defaults = {
        "learning_rate": 2e-5,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": True,
        "max_length": 1024,
        "bf16": True,
        "logging_nan_inf_filter": True,
        "train_sampling_strategy": "random",
        "remove_unused_columns": True,
        "dataset_kwargs": None,
    }
    stock = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert {name: getattr(stock, name) for name in defaults} == defaults
    trainer = runs["torch"].trainer
    ours = {
        "gradient_checkpointing": False,
        "max_length": None,
        "bf16": False,
        "fp16": False,
        "packing": False,
        "logging_nan_inf_filter": False,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    assert {name: getattr(trainer.args, name) for name in ours} == ours
    assert not trainer.model.get_base_model().is_gradient_checkpointing


def test_the_rates_of_both_engines_are_the_recipes_not_trls(runs):
    wanted = [
        recipe.learning_rate(step, peak=1e-2, steps=8, warmup_steps=2) for step in range(1, 9)
    ]
    for run in runs.values():
        steps = tiny_problem.steps_of(run.settings)
        assert [step["learning_rate"] for step in steps] == pytest.approx(wanted)
    assert runs["torch"].trainer.optimizer.optimizer.param_groups[0]["lr"] == wanted[-1]


def test_a_row_above_1024_tokens_vanishes_in_stock_and_trains_in_ours(tmp_path, tiny):
    rows = [row([9] * 1100, (1099, 1100))]
    stock = stock_trainer(torch_base(tiny), tiny, tmp_path, [*rows, row([9, 8], (1, 2))])
    assert stock.train_dataset["input_ids"][:] == [[9, 8]]
    small = {"optimizer_steps": 1, "effective_batch": 1, "micro_batch": 1}
    run = settings(tmp_path, tiny, "torch", rows, context=1200, **small)
    assert watched(run).result["status"] == "ok"
    (step,) = tiny_problem.steps_of(run)
    assert (step["tokens"], step["supervised_tokens"]) == (1100, 1)


def test_a_model_named_by_a_string_is_float32_in_stock_and_as_asked_in_ours(tmp_path):
    import torch

    folder = tiny_problem.make_model(tmp_path / "model", num_hidden_layers=1, dtype="bfloat16")
    rows = uneven_rows()
    stock = stock_trainer(str(folder), folder, tmp_path, rows).model
    assert {p.dtype for p in stock.parameters()} == {torch.float32}
    small = {"optimizer_steps": 1, "effective_batch": 1, "micro_batch": 1}
    model = watched(
        settings(tmp_path, folder, "torch", rows, dtype="bfloat16", **small)
    ).trainer.model
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}


def test_scaled_gradients_of_float16_weights_need_float32_adapters(tmp_path, tiny):
    import torch
    from peft import LoraConfig, get_peft_model

    def unscale(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(trained)
        scaler = torch.amp.GradScaler("cpu")
        ids = torch.arange(5, 25)[None]
        scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
        scaler.unscale_(adamw)
        return all(torch.isfinite(p.grad).all() for p in trained)

    half = get_peft_model(
        torch_base(tiny, "float16"),
        LoraConfig(task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        unscale(half)
    assert unscale(torch_model(tiny, "float16"))


def test_a_step_on_float16_weights_is_that_on_float32_weights(tmp_path, tiny):
    run = settings(tmp_path, tiny, "torch", uneven_rows(), optimizer_steps=2)
    examples = batches.read_examples(run["train_file"], tiny_problem.CONTEXT)
    plan = batches.Plan(
        batches.row_order(examples.lengths, 2, 4, 2, 0),
        lambda rows: batches.make_batch(examples, list(rows), tiny_problem.CONTEXT, 32),
    )
    steps = {}
    for dtype in ("float32", "float16"):
        with measure.steps_file(tmp_path / f"{dtype}.jsonl") as file:
            kept = recorder.Recorder(file)
            memory = measure.TorchMemory("cpu")
            torch_trainer.train(torch_model(tiny, dtype), run, "cpu", dtype, memory, plan, kept)
        steps[dtype] = [(step.loss, step.grad_norm) for step in kept.steps]
    assert np.allclose(steps["float16"], steps["float32"], rtol=0.02)


def test_nested_columns_grow_keys_so_the_trainer_of_ours_gets_row_numbers_alone(runs):
    from datasets import Dataset

    calls = [{"arguments": {"path": "a"}}, {"arguments": {"command": "ls"}}]
    assert Dataset.from_list(calls)[0]["arguments"] == {"path": "a", "command": None}
    dataset = runs["torch"].trainer.train_dataset
    assert dataset.column_names == ["row"]
    assert dataset["row"][:] == runs["torch"].order.reshape(-1).tolist()


def scored_by_stock(tokens, padding, offset, length):
    """Places of the tokens that mlx-lm's own loss scores: where its gradient isn't zero."""
    import mlx.core as mx
    from mlx_lm.tuner.trainer import default_loss

    batch = mx.array([list(range(1, tokens + 1)) + [0] * padding])

    def loss(logits):
        return default_loss(lambda inputs: logits, batch, mx.array([[offset, length]]))[0]

    gradient = np.array(mx.grad(loss)(mx.zeros((1, tokens + padding - 1, 16))))
    return (np.flatnonzero(np.abs(gradient[0]).sum(-1)) + 1).tolist()


def test_the_stock_loss_scores_the_first_pad_token_of_each_row(tmp_path):
    assert scored_by_stock(8, 4, offset=5, length=8) == [5, 6, 7, 8]
    batch = batch_of(tmp_path, [row(range(1, 9), (5, 8))])
    assert (batch.positions[batch.weights == 1] + 1).tolist() == [5, 6, 7]


def test_the_stock_loss_has_no_way_to_score_two_spans(tmp_path):
    wanted = [2, 3, 6, 7]
    expressible = [
        scored_by_stock(8, 4, offset, length)
        for offset, length in itertools.product(range(10), range(12))
        if offset <= length and length > 0
    ]
    assert [2, 3, 4, 5, 6, 7] in expressible
    assert wanted not in expressible
    batch = batch_of(tmp_path, [row(range(1, 9), (2, 4), (6, 8))])
    assert (batch.positions[batch.weights == 1] + 1).tolist() == wanted


def test_mask_prompt_keeps_the_last_turn_alone_where_ours_keeps_each(prepared):
    from mlx_lm.tuner.datasets import ChatDataset

    turns = [make.user("Read a.txt"), make.assistant("Read the file and run the test.")] * 4
    messages, spans = encoded(make.record(*turns), prepared)
    ids, labels = masking.labels_of(spans)
    plain = [{key: each[key] for key in ("role", "content")} for each in messages]
    tokens, offset = ChatDataset([], prepared.tokenizer, mask_prompt=True).process(
        {"messages": plain}
    )
    assert tokens == ids
    supervised = [token for token in labels if token != IGNORED]
    one = len(supervised) // 4
    assert tokens[offset:-1] == supervised[-one:] == supervised[:one]


def test_right_truncation_poisons_the_stock_adapter_where_ours_refuses_the_row(tmp_path, tiny):
    from mlx import optimizers
    from mlx_lm.tuner import trainer

    model = mlx_model(tiny)
    arguments = trainer.TrainingArgs(
        iters=1, batch_size=1, max_seq_length=16, adapter_file=str(tmp_path / "a.safetensors")
    )
    trainer.train(model, optimizers.Adam(1e-5), [(list(range(5, 35)), 25)], args=arguments)
    assert np.isnan(trained_b(model)).all()
    cut = row(range(5, 35), (25, 30))
    cut = {name: values[:16] for name, values in cut.items()}
    with pytest.raises(ValueError, match="line 1: no supervised token"):
        batches.read_examples(tiny_problem.write_rows(tmp_path / "cut.jsonl", [cut]), 16)


def test_the_last_stock_validation_precedes_the_last_update(tmp_path, tiny):
    model, rows = mlx_model(tiny), uneven_rows()
    losses, _, tokens = by_full_logits(tiny, rows)
    reports = stock_training(model, tmp_path, rows[3:], iters=1, val_rows=rows, val_batches=-1)
    assert [report["val_loss"] for report in reports] == [
        pytest.approx(losses.sum() / tokens.sum(), rel=1e-4)
    ]
    after, _ = mlx_loss.evaluate(model, [batch_of(tmp_path, rows)])
    assert abs(after / tokens.sum() - reports[-1]["val_loss"]) > 0.01


def test_stock_waits_for_the_device_at_each_micro_batch_and_ours_at_each_step(tmp_path, tiny):
    rows, calls = uneven_rows(), {}
    for parts in (1, 4):
        model, accumulate = mlx_model(tiny), {"grad_accumulation_steps": parts}
        calls["stock", parts] = calls_to(
            "eval", stock_training, model, tmp_path, rows, 2 * parts, **accumulate
        )
        run = settings(tmp_path, tiny, "mlx", rows, optimizer_steps=2, micro_batch=4 // parts)
        calls["ours", parts] = calls_to("eval", watched, run)
    assert calls["stock", 4] == calls["stock", 1] + 2 * 3
    assert calls["ours", 4] == calls["ours", 1]


def test_stock_checkpointing_patches_the_class_of_every_model(tiny, monkeypatch):
    from mlx_lm.tuner.trainer import grad_checkpoint

    one, other = mlx_model(tiny), mlx_model(tiny)
    kind = type(other.layers[0])
    monkeypatch.setattr(kind, "__call__", kind.__call__)
    grad_checkpoint(one.layers[0])
    assert type(other.layers[0]).__call__.__name__ == "checkpointed_fn"


def lengths_seen_by_stock(rows, evaluations=1, **options):
    """The lengths of the rows that mlx-lm's own evaluation takes, batch by batch."""
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.tuner import trainer

    seen = []

    def loss(model, batch, lengths):
        seen.append(lengths[:, 1].tolist())
        return mx.array(0.0), mx.array(1)

    for _ in range(evaluations):
        trainer.evaluate(nn.Identity(), rows, loss=loss, **options)
    return seen


def test_stock_batches_are_sorted_by_length_and_lose_the_longest_rows():
    rows = [([5] * length, 0) for length in LENGTHS]
    seen = lengths_seen_by_stock(rows, batch_size=2, num_batches=-1)
    assert sorted(seen) == [[9, 14], [21, 37]]


def test_stock_validation_takes_25_random_batches():
    from mlx_lm.tuner.trainer import TrainingArgs

    rows = [([5] * length, 0) for length in range(1, 61)]
    default = TrainingArgs().val_batches
    seen = lengths_seen_by_stock(rows, evaluations=2, batch_size=1, num_batches=default)
    first, second = seen[:25], seen[25:]
    assert len(first) == len(second) == 25
    assert sorted(first) != sorted(second)


def test_stock_accumulation_averages_means_and_drops_the_tail(tmp_path, tiny):
    rows = uneven_rows()[:3]
    gradients, tokens = [], []
    for each in rows:
        batch = batch_of(tmp_path, [each])
        gradients.append(gradient_of_b(mlx_model(tiny), batch))
        tokens.append(batch.supervised)
    moved = {}
    for iters in (2, 3):
        model = mlx_model(tiny)
        stock_training(model, tmp_path, rows, iters, grad_accumulation_steps=2)
        moved[iters] = -trained_b(model)
    means = (gradients[0] / tokens[0] + gradients[1] / tokens[1]) / 2
    right = (gradients[0] + gradients[1]) / (tokens[0] + tokens[1])
    assert np.linalg.norm(moved[2] - means) < 1e-4 * np.linalg.norm(means)
    assert np.linalg.norm(moved[2] - right) > 0.1 * np.linalg.norm(right)
    assert np.array_equal(moved[3], moved[2])
    assert np.linalg.norm(gradients[2]) > 0


def test_stock_never_clips(tmp_path, tiny):
    each = row([9] * 20, (1, 20))
    model = mlx_model(tiny)
    stock_training(model, tmp_path, [each], iters=1)
    assert np.linalg.norm(trained_b(model)) > 2


@pytest.mark.parametrize("engine", ENGINES)
def test_ours_clips_and_reports_the_norm_before(tmp_path, tiny, engine):
    moved, norms = {}, {}
    for limit in (1e3, 1e-9):
        run = settings(
            tmp_path,
            tiny,
            engine,
            uneven_rows(),
            optimizer_steps=1,
            warmup_steps=0,
            epsilon=1e-5,
            max_grad_norm=limit,
        )
        run = watched(run)
        moved[limit] = max(
            np.abs(value).max() for name, value in run.adapter.items() if "lora_b" in name.lower()
        )
        norms[limit] = tiny_problem.steps_of(run.settings)[0]["grad_norm"]
    assert norms[1e3] == pytest.approx(norms[1e-9])
    assert norms[1e3] > 1
    assert moved[1e3] > 5e-3
    assert moved[1e-9] < 2e-6


def test_the_stock_adamw_of_mlx_decays_weights_unasked():
    import mlx.core as mx
    from mlx import optimizers

    options = {"learning_rate": 0.1, "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.0}
    ours = mlx_loop.make_optimizer(recipe.optimizer("mlx", "matched"), options)
    left = []
    for optimizer in (optimizers.AdamW(learning_rate=0.1), ours):
        weights = {"w": mx.array([1.0])}
        optimizer.init(weights)
        left.append(optimizer.apply_gradients({"w": mx.array([0.0])}, weights)["w"].item())
    assert left == [pytest.approx(1 - 0.1 * 0.01), 1.0]


def test_stock_lora_is_scale_20_on_the_last_16_layers(tmp_path):
    from mlx_lm.lora import CONFIG_DEFAULTS
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    folder = tiny_problem.make_model(tmp_path / "deep", num_hidden_layers=18)
    stock, _ = load_model(folder)
    linear_to_lora_layers(
        stock, CONFIG_DEFAULTS["num_layers"], dict(CONFIG_DEFAULTS["lora_parameters"])
    )
    found = {}
    for name, model in (("stock", stock), ("ours", mlx_model(folder))):
        adapters = mlx_lora.adapters(model)
        layers = sorted({int(key.split(".")[2]) for key in adapters})
        found[name] = layers, {module.scale for module in adapters.values()}
    assert found["stock"] == (list(range(2, 18)), {20.0})
    assert found["ours"] == (list(range(18)), {2.0})


def test_a_callback_given_to_stock_lora_is_thrown_away(monkeypatch):
    from mlx_lm import lora

    seen = []
    monkeypatch.setattr(lora, "load", lambda *_, **__: (None, None))
    monkeypatch.setattr(lora, "load_dataset", lambda *_: (None, None, None))
    monkeypatch.setattr(lora, "train_model", lambda *given: seen.append(given[-1]))
    lora.run(SimpleNamespace(**{**lora.CONFIG_DEFAULTS, "train": True}), training_callback=print)
    assert seen == [None]


def test_a_graph_per_shape_is_few_graphs_in_ours_and_many_in_stock(tmp_path):
    from mlx_lm.tuner.trainer import iterate_batches
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [row([5] * length, (1, length)) for length in range(20, 2048, 20)]
    path = tiny_problem.write_rows(tmp_path / "long.jsonl", rows)
    examples = batches.read_examples(path, 2048)
    collate = DataCollatorForLanguageModeling(pad_token_id=0)
    trl = {collate([each])["input_ids"].shape for each in rows}
    stock = {
        batch.shape for batch, _ in iterate_batches([(e["input_ids"], 0) for e in rows], 1, 2048)
    }
    ours = {
        batches.make_batch(examples, [number], 2048, 256).input_ids.shape
        for number in range(len(rows))
    }
    assert len(trl) == len(rows) == 102
    assert len(stock) > 60
    assert len(ours) == 4


def test_mlx_traces_each_shape_of_ours_once(tmp_path, tiny, monkeypatch):
    traced, loss = [], mlx_loop.batch_loss

    def counted(model, input_ids, positions, *rest):
        traced.append((*input_ids.shape, len(positions)))
        return loss(model, input_ids, positions, *rest)

    monkeypatch.setattr(mlx_loop, "batch_loss", counted)
    result = watched(tiny_problem.settings(tmp_path, tiny, "mlx", optimizer_steps=8)).result
    assert len(traced) == len(set(traced)) == result["distinct_shapes"]
    assert {length for _, length, _ in traced} <= set(batches.padded_lengths(tiny_problem.CONTEXT))
    assert len(traced) < 16


def test_mlx_takes_no_boolean_index_so_positions_are_numbers_made_on_the_host(tmp_path):
    import mlx.core as mx

    with pytest.raises(ValueError, match="boolean indices are not yet supported"):
        mx.array([1, 2, 3])[mx.array([True, False, True])]
    positions = batch_of(tmp_path, uneven_rows()).positions
    assert isinstance(positions, np.ndarray)
    assert positions.dtype == np.int32


def test_a_clock_read_before_mlx_is_done_shows_nothing():
    import mlx.core as mx

    x = mx.random.normal((512, 512)) / 30
    mx.eval(x)
    clock = measure.StepClock(mx.synchronize)
    clock.start()
    started = time.perf_counter()
    y = x
    for _ in range(8):
        y = mx.matmul(y, x, stream=mx.cpu)
    mx.async_eval(y)
    unsynchronized = time.perf_counter() - started
    assert unsynchronized < clock.stop() / 2


def test_the_clock_of_ours_waits_for_mlx_at_the_end_of_each_step(tmp_path, tiny):
    calls = [
        calls_to(
            "synchronize",
            watched,
            settings(tmp_path, tiny, "mlx", uneven_rows(), optimizer_steps=steps),
        )
        for steps in (1, 3)
    ]
    assert calls[1] == calls[0] + 2


@pytest.fixture
def mlx_limits():
    """MLX's memory as it was, after a test that changes it."""
    import mlx.core as mx

    mx.clear_cache()
    memory, cache = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    mx.set_memory_limit(memory)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    mx.clear_cache()


def test_the_memory_limit_of_mlx_is_no_limit(mlx_limits):
    import mlx.core as mx

    mx.set_memory_limit(50_000_000)
    before = mx.get_active_memory()
    array = mx.zeros((160_000_000,), mx.uint8)
    mx.eval(array)
    assert mx.get_active_memory() - before >= 160_000_000


def test_the_peak_of_mlx_leaves_out_its_cache_and_ours_adds_it(mlx_limits):
    import mlx.core as mx

    mx.reset_peak_memory()
    for megabytes in (10, 13, 16):
        array = mx.zeros((megabytes, 1_000_000), mx.uint8)
        mx.eval(array)
        del array
    memory = measure.mlx_memory()
    assert memory.peak < mx.get_active_memory() + 20_000_000
    assert memory.reserved == mx.get_active_memory() + mx.get_cache_memory()
    assert memory.reserved - mx.get_active_memory() > 38_000_000


def test_stock_empties_the_cache_at_each_iteration_and_ours_at_none(tmp_path, tiny):
    rows, calls = uneven_rows(), {}
    for steps in (1, 3):
        model = mlx_model(tiny)
        calls["stock", steps] = calls_to(
            "clear_cache", stock_training, model, tmp_path, rows, steps
        )
        run = settings(tmp_path, tiny, "mlx", rows, optimizer_steps=steps)
        calls["ours", steps] = calls_to("clear_cache", watched, run)
    assert (calls["stock", 1], calls["stock", 3]) == (1, 3)
    assert calls["ours", 1] == calls["ours", 3]


def test_an_engine_that_aborts_takes_a_child_with_it_and_the_parent_says_so(tmp_path):
    code = "import os; print('step 3'); os.abort()"
    ending = guard.run_child(
        [sys.executable, "-c", code],
        guard.child_environment(dict(os.environ), 1),
        tmp_path / "log",
        tmp_path / "memory.jsonl",
    )
    assert ending.exit_code == -signal.SIGABRT
    assert ending.last_lines[0] == "step 3"


def test_adapter_files_have_the_keys_shapes_and_scale_of_their_library(runs, tiny):
    peft, mlx = runs["torch"].adapter, runs["mlx"].adapter
    wanted = recipe.lora_shapes(tiny_problem.model_config(tiny))
    assert wanted["model.layers.0.self_attn.k_proj"] == (64, 32)
    assert {key: value.shape for key, value in peft.items()} == {
        f"base_model.model.{name}.lora_{which}.weight": shape
        for name, (inputs, outputs) in wanted.items()
        for which, shape in (("A", (8, inputs)), ("B", (outputs, 8)))
    }
    assert {key: value.shape for key, value in mlx.items()} == {
        f"{name}.lora_{which}": shape
        for name, (inputs, outputs) in wanted.items()
        for which, shape in (("a", (inputs, 8)), ("b", (8, outputs)))
    }
    peft, mlx = runs["torch"].adapter_config, runs["mlx"].adapter_config
    assert mlx["lora_parameters"]["scale"] == peft["lora_alpha"] / peft["r"] == 2.0


def test_an_adapter_trained_on_4_bit_weights_has_another_loss_on_16_bit_weights(tmp_path, tiny):
    import mlx_lm

    folder = tiny_problem.quantize(tiny, tmp_path / "model-4bit")
    run = watched(settings(tmp_path, folder, "mlx", uneven_rows(), bits=4))
    plain = watched(settings(tmp_path, tiny, "mlx", uneven_rows(), name="plain"))
    assert run.result["model_sha256"] != plain.result["model_sha256"]
    batch = batch_of(tmp_path, uneven_rows())
    losses = {}
    for weights in (folder, tiny):
        model, _ = mlx_lm.load(str(weights), adapter_path=f"{run.settings['state_folder']}/adapter")
        losses[weights] = mlx_loss.evaluate(model, [batch])[0] / batch.supervised
    assert losses[folder] == pytest.approx(run.result["val_loss"], rel=1e-4)
    assert abs(losses[tiny] / losses[folder] - 1) > 1e-3
