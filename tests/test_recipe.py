import math
from itertools import pairwise

import pytest

from workflow_scripts.lib import recipe

CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


def test_rate_warms_up_peaks_and_ends_above_zero():
    rates = [recipe.learning_rate(n, peak=1.0, steps=20, warmup_steps=4) for n in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in pairwise(rates[3:]))
    assert 0 < rates[-1] < 0.02
    assert rates[11] == pytest.approx(0.5 * (1 + math.cos(math.pi * 8 / 17)))


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("steps", [1, 5])
def test_rate_is_never_zero_nor_above_the_peak(steps, warmup):
    rates = [
        recipe.learning_rate(n, peak=2.0, steps=steps, warmup_steps=warmup)
        for n in range(1, steps + 1)
    ]
    assert all(0 < rate <= 2.0 for rate in rates)


def test_constant_rate_and_steps_outside():
    assert recipe.learning_rate(1, peak=3.0, steps=9, warmup_steps=4, schedule="constant") == 3.0
    with pytest.raises(ValueError, match="step 0 is outside 1 to 9"):
        recipe.learning_rate(0, peak=3.0, steps=9)


def test_matched_recipe_is_one_and_published_is_two():
    assert recipe.optimizer("torch", "matched") == recipe.optimizer("mlx", "matched")
    assert recipe.optimizer("mlx", "matched").bias_correction
    assert recipe.optimizer("torch", "published").kind == "adamw"
    published = recipe.optimizer("mlx", "published")
    assert (published.kind, published.schedule) == ("adam", "constant")
    with pytest.raises(ValueError, match="'mached' is unknown; allowed are matched, published"):
        recipe.optimizer("mlx", "mached")


def test_accumulation():
    assert [recipe.accumulation(4, n) for n in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match="allowed are 1, 2, 4"):
        recipe.accumulation(4, 3)


def test_lora_shapes_of_grouped_heads_and_wide_heads():
    shapes = recipe.lora_shapes(CONFIG)
    assert len(shapes) == 14
    assert shapes["model.layers.1.self_attn.k_proj"] == (128, 64)
    assert shapes["model.layers.0.mlp.down_proj"] == (384, 128)
    wide = recipe.lora_shapes({**CONFIG, "head_dim": 64})
    assert wide["model.layers.0.self_attn.o_proj"] == (256, 128)


def test_other_modules_or_counts_are_refused():
    shapes = recipe.lora_shapes(CONFIG)
    count = sum(16 * (a + b) for a, b in shapes.values())
    recipe.check_adapters(shapes, CONFIG, 16, count)
    with pytest.raises(ValueError, match="expected 77824"):
        recipe.check_adapters(shapes, CONFIG, 16, count + 1)
    with pytest.raises(ValueError, match="Llama-like"):
        recipe.check_adapters({**shapes, "lm_head": (1, 1)}, CONFIG, 16, count)
