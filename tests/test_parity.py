"""PyTorch and MLX solve the same problem: same float32 weights, rows and adapters on the CPU."""

import json
import math

import numpy as np
import pytest

from workflow_scripts import check_parity
from workflow_scripts.lib import (
    mlx_loop,
    mlx_lora,
    parity,
    recipe,
    tiny_problem,
    torch_lora,
    torch_loss,
    training,
)
from workflow_scripts.lib.batches import read_examples

LOSS, GRADIENT, AFTER_20_STEPS = 1e-5, 1e-4, 1e-3
BASES = ("tied head", "own head", "4 bit on dequantized weights")
ALLOWED = {
    **{f"{base}: loss of each row": LOSS for base in BASES},
    **{f"{base}: right predictions of each row": 0 for base in BASES},
    **{f"{base}: loss of three rows at once": LOSS for base in BASES},
    **{f"{base}: gradient of each matrix": GRADIENT for base in BASES},
    **{
        f"{engine}: {split} against 1 x 4, {what}": allowed
        for engine in ("torch", "mlx")
        for split in ("2 x 2", "4 x 1")
        for what, allowed in (("loss", LOSS), ("gradients", GRADIENT))
    },
    "1 optimizer step: loss of each step": LOSS,
    "1 optimizer step: grad_norm of each step": LOSS,
    "20 optimizer steps: loss of each step": AFTER_20_STEPS,
    "20 optimizer steps: grad_norm of each step": AFTER_20_STEPS,
    **{
        f"{steps}: {what}": allowed
        for steps in ("1 optimizer step", "20 optimizer steps")
        for what, allowed in (
            ("rates and tokens of each step", 0),
            ("validation loss before", LOSS),
            ("validation loss after", AFTER_20_STEPS),
            ("token accuracy after", 0.01),
            ("each adapter matrix", AFTER_20_STEPS),
        )
    },
}


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return {check.what: check for check in parity.checks(tmp_path_factory.mktemp("parity"))}


@pytest.mark.parametrize("what", ALLOWED)
def test_both_engines_agree_on(checks, what):
    assert checks[what].allowed == ALLOWED[what]
    assert checks[what].found <= ALLOWED[what]


def test_nothing_else_is_checked_than_what_these_tests_name(checks):
    assert checks.keys() == ALLOWED.keys()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_problem.make_model(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    rows = tiny_problem.write_rows(path, tiny_problem.make_rows(6))
    return read_examples(rows, tiny_problem.CONTEXT)


@pytest.mark.parametrize("make_side", [parity.torch_side, parity.mlx_side])
def test_padding_and_batch_mates_change_no_row(tiny_folder, examples, make_side):
    side = make_side(tiny_folder)
    together = side.evaluate([parity.batch_of(examples, range(6))])
    alone = side.evaluate([parity.batch_of(examples, [row]) for row in range(6)])
    assert together[0] == pytest.approx(alone[0], rel=LOSS)
    assert together[1] == alone[1]


def test_what_must_be_equal_of_both_results_is(tmp_path, tiny_folder):
    result, other = (
        training.run(
            tiny_problem.settings(tmp_path, tiny_folder, engine, optimizer_steps=10), module.load
        )
        for engine, module in (("torch", torch_lora), ("mlx", mlx_lora))
    )
    assert result["status"] == other["status"] == "ok"
    for key in (
        "trainable_parameters",
        "total_parameters",
        "distinct_shapes",
        "optimizer_steps",
        "skipped_steps",
        "trained_tokens",
        "trained_supervised_tokens",
        "val_rows",
        "val_tokens",
        "flops_per_token",
        "examples_sha256",
        "model_sha256",
        "initial_adapter_sha256",
    ):
        assert result[key] == other[key] is not None, key
    assert result["val_loss"] < 0.9 * result["val_loss_before"]
    json.dumps([result, other], allow_nan=False)


def failed(checks):
    return {check.what for check in checks if not check.holds}


def adapters_of_mlx_changed(monkeypatch, change):
    same = mlx_lora.add_adapters
    monkeypatch.setattr(mlx_lora, "add_adapters", lambda *given: same(*change(*given)))


def test_the_gate_sees_another_scale_of_the_adapters(monkeypatch, tiny_folder, examples):
    adapters_of_mlx_changed(
        monkeypatch, lambda model, config, rank, _, start: (model, config, rank, 20 * rank, start)
    )
    sides = parity.torch_side(tiny_folder), parity.mlx_side(tiny_folder)
    assert failed(parity.same_losses("x", *sides, examples)) >= {
        "x: loss of each row",
        "x: gradient of each matrix",
    }


def test_the_gate_sees_another_start(monkeypatch, tmp_path, tiny_folder):
    adapters_of_mlx_changed(
        monkeypatch,
        lambda *given: (*given[:4], {name: a * 1.01 for name, a in given[4].items()}),
    )
    assert "1 optimizer step: each adapter matrix" in failed(
        parity.same_trainings(tmp_path, tiny_folder, 1)
    )


def test_the_gate_sees_the_stock_adamw_of_mlx(monkeypatch, tmp_path, tiny_folder):
    from mlx import optimizers

    monkeypatch.setattr(
        mlx_loop,
        "make_optimizer",
        lambda update, settings: optimizers.AdamW(learning_rate=settings["learning_rate"]),
    )
    assert "1 optimizer step: each adapter matrix" in failed(
        parity.same_trainings(tmp_path, tiny_folder, 1)
    )


def test_the_gate_sees_a_mean_over_rows_in_place_of_tokens(monkeypatch, tiny_folder, examples):
    same = torch_loss.batch_loss

    def mean_of_batch(model, ids, positions, targets, weights, chunks):
        loss, correct = same(model, ids, positions, targets, weights, chunks)
        return loss / weights.sum() * 100, correct

    monkeypatch.setattr(torch_loss, "batch_loss", mean_of_batch)
    side = parity.torch_side(tiny_folder)
    assert failed(parity.same_splits("torch", side, examples)) == {
        f"torch: {split} against 1 x 4, {what}"
        for split in ("2 x 2", "4 x 1")
        for what in ("loss", "gradients")
    }


def test_a_gradient_that_is_zero_or_missing_is_no_agreement():
    one, zero = {("m", "a"): np.ones((2, 2))}, {("m", "a"): np.zeros((2, 2))}
    assert parity.distance(one, one) == 0
    assert parity.distance(one, zero) == parity.distance({}, one) == math.inf
    assert not parity.Check("x", math.nan, 1).holds


def test_the_report_names_what_it_checked_and_a_failure_every_check(tmp_path, monkeypatch):
    made = [parity.Check("loss", 2e-7, 1e-5), parity.Check("tokens", 0, 0)]
    monkeypatch.setattr(parity, "checks", lambda folder: iter(made))
    check_parity.check_parity(tmp_path / "parity.md")
    text = (tmp_path / "parity.md").read_text()
    assert text.startswith(check_parity.TITLE + "\n\nYes, on the CPU")
    assert "| loss            | 2.0e-07 | 1e-05   |" in text
    made.append(parity.Check("gradients", 0.5, 1e-4))
    with pytest.raises(ValueError, match=r"1 of 3 checks do not hold.*gradients: 5.0e-01 apart"):
        check_parity.check_parity(tmp_path / "other.md")
    assert not (tmp_path / "other.md").exists()


def test_the_stock_adamw_of_mlx_would_not_have_been_the_same():
    import mlx.core as mx
    from mlx import optimizers

    ours = mlx_loop.make_optimizer(
        recipe.optimizer("mlx", "matched"),
        {"learning_rate": 0.1, "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.0},
    )
    stock = optimizers.AdamW(learning_rate=0.1, weight_decay=0.0)
    moved = []
    for optimizer in (ours, stock):
        start = {"w": mx.array([1.0])}
        optimizer.init(start)
        moved.append(1.0 - optimizer.apply_gradients({"w": mx.array([0.5])}, start)["w"].item())
    assert moved[0] == pytest.approx(0.1, rel=1e-4)
    assert moved[1] == pytest.approx(0.316, rel=1e-2)
