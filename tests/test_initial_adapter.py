"""Where LoRA starts: one file per model, rank and seed, the same for both engines."""

import math

import numpy as np
import pytest

from workflow_scripts.draw_adapter import draw_adapter
from workflow_scripts.lib import initial_adapter, mlx_lora, tiny_problem, torch_lora

NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_problem.make_model(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture
def drawn(tmp_path, tiny_folder):
    draw_adapter(tiny_folder, tmp_path / "r8-seed0.safetensors", rank=8, seed=0)
    return tmp_path / "r8-seed0.safetensors"


def test_a_depends_on_seed_name_and_shape_alone():
    one = initial_adapter.draw_a(0, NAME, 16, 128)
    assert one.dtype == np.float32
    assert one.shape == (16, 128)
    assert np.array_equal(one, initial_adapter.draw_a(0, NAME, 16, 128))
    assert not np.array_equal(one, initial_adapter.draw_a(1, NAME, 16, 128))
    assert not np.array_equal(one, initial_adapter.draw_a(0, NAME.replace("0", "1"), 16, 128))
    bound = 1 / math.sqrt(128)
    assert np.abs(one).max() <= bound
    assert one.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_file_is_the_same_bytes_each_time_and_other_bytes_for_another_seed(
    tmp_path, tiny_folder, drawn
):
    draw_adapter(tiny_folder, tmp_path / "again.safetensors", rank=8, seed=0)
    draw_adapter(tiny_folder, tmp_path / "other.safetensors", rank=8, seed=1)
    assert (tmp_path / "again.safetensors").read_bytes() == drawn.read_bytes()
    assert (tmp_path / "other.safetensors").read_bytes() != drawn.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_engines_start_from_exactly_what_the_file_holds(tiny_folder, drawn, dtype):
    import mlx.core as mx
    import torch
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM

    config = tiny_problem.model_config(tiny_folder)
    start = initial_adapter.read(drawn, config, 8)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=getattr(torch, dtype))
    peft = torch_lora.adapters(torch_lora.add_adapters(model, config, 8, 16, start))
    model, _ = load_model(tiny_folder)
    model.set_dtype(getattr(mx, dtype))
    mlx_lora.add_adapters(model, config, 8, 16, start)
    mlx = mlx_lora.adapters(model)
    assert peft.keys() == mlx.keys() == start.keys()
    for name, a in start.items():
        assert np.array_equal(peft[name].lora_A["default"].weight.detach().numpy(), a)
        assert np.array_equal(np.array(mlx[name].lora_a), a.T)
        assert mlx[name].lora_a.dtype == mlx[name].lora_b.dtype == mx.float32
        assert peft[name].lora_A["default"].weight.dtype == torch.float32
        assert str(mlx[name].linear.weight.dtype).endswith(dtype)
        assert not peft[name].lora_B["default"].weight.any()
        assert not np.array(mlx[name].lora_b).any()
        assert peft[name].scaling["default"] == mlx[name].scale == 2.0


def test_a_damaged_file_and_another_models_file_are_refused_by_name(tmp_path, tiny_folder, drawn):
    config = tiny_problem.model_config(tiny_folder)
    with pytest.raises(ValueError, match=r"r8-seed0.*rank 4.*\(8, 128\), expected \(4, 128\)"):
        initial_adapter.read(drawn, config, 4)
    drawn.write_bytes(drawn.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"r8-seed0.*not a whole safetensors file"):
        initial_adapter.read(drawn, config, 8)
