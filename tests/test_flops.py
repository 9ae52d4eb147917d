"""The arithmetic of a step against counts by hand and against torch's own counter."""

import time

import numpy as np
import pytest

from workflow_scripts.lib import (
    batches,
    flops,
    matmul_peak,
    recipe,
    tiny_problem,
    torch_lora,
    torch_loss,
)

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 10,
}
QWEN_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
}


def batch(rows, length, supervised):
    place = np.zeros((1, supervised), dtype=np.int32)
    ids = np.zeros((rows, length), dtype=np.int32)
    return batches.Batch(ids, place, place, place, rows * length, supervised)


def test_one_layer_by_hand():
    """q and o: 8x8; k and v: 8x4; gate, up, down: 8x12. Rank 2; rows of 5 tokens."""
    weights = 2 * 64 + 2 * 32 + 3 * 96
    sides = 2 * 16 + 2 * 12 + 3 * 20
    forward = 2 * weights + 2 * 2 * sides + 4 * 5 * 8
    backward = 2 * weights + 4 * 2 * sides + 8 * 5 * 8 - 2 * 8 * (16 + 3 * 2)
    head = 2 * 2 * 10 * 8
    count = flops.counter(SMALL, 2, checkpointing=False)
    assert count(batch(3, 5, 4)) == 15 * (forward + backward) + 4 * head
    again = flops.counter(SMALL, 2, checkpointing=True)
    assert again(batch(3, 5, 4)) == 15 * (2 * forward + backward + 2 * 8 * 22) + 4 * head


def test_a_real_shape_is_near_four_flop_a_weight():
    """Qwen 2.5 0.5B: 357.8 million weights in its linear layers, 4 FLOP each where rows are short;
    its output head costs 4 x 136 million for each supervised position.
    """
    linear = sum(a * b for a, b in recipe.lora_shapes(QWEN_05B).values())
    assert linear == pytest.approx(357.8e6, rel=1e-3)
    count = flops.counter(QWEN_05B, 16, checkpointing=False)
    assert count(batch(1, 64, 0)) / 64 == pytest.approx(4 * linear, rel=0.05)
    assert count(batch(1, 64, 64)) - count(batch(1, 64, 0)) == 64 * 4 * 151936 * 896
    attention = count(batch(1, 4096, 0)) / 4096 - count(batch(1, 64, 0)) / 64
    assert attention == pytest.approx(12 * 24 * 896 * (4096 - 64), rel=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_torch_counts_the_same(tmp_path, checkpointing):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder = tiny_problem.make_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = tiny_problem.model_config(folder)
    model = torch_lora.add_adapters(model, config, 8, 16, tiny_problem.start(folder))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = tiny_problem.write_rows(tmp_path / "rows.jsonl", tiny_problem.make_rows(3))
    examples = batches.read_examples(rows, tiny_problem.CONTEXT)
    made = batches.make_batch(examples, [0, 1, 2], tiny_problem.CONTEXT, chunk=1)
    with FlopCounterMode(display=False) as counter:
        loss, _ = torch_loss.batch_loss(model, *torch_loss.to_device(made, "cpu"))
        loss.backward()
    counted = flops.counter(config, 8, checkpointing)(made)
    # Torch ends a layer's second computation as soon as all that is needed is there.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01 if checkpointing else 1e-9)


def test_utilization_is_rate_times_flop_over_peak():
    assert flops.utilization(4e9, 500.0, 8e12) == pytest.approx(0.25)
    assert flops.utilization(4e9, None, 8e12) is None
    assert flops.utilization(None, 500.0, 8e12) is None


def test_peak_takes_the_best_size_and_keeps_to_its_time():
    asked = []

    def product(size):
        asked.append(size)
        seconds = {256: 0.01, 512: 0.02, 1024: 0.5}[size]
        return lambda: time.sleep(seconds)

    started = time.perf_counter()
    peak = matmul_peak.highest_flops(product, 0.4)
    assert time.perf_counter() - started < 0.5
    assert asked == [256, 512]
    assert peak == pytest.approx(2 * 512**3 / 0.02, rel=0.1)


def test_both_engines_have_a_peak_here():
    assert matmul_peak.torch_peak_flops("cpu", "float32") > 1e8
    assert matmul_peak.mlx_peak_flops("float32") > 1e8
