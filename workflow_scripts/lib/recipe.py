"""What PyTorch and MLX must share for their runs to be the same problem, in plain Python."""

import math
from collections.abc import Mapping
from typing import NamedTuple

RECIPES = ("matched", "published")

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
LORA_LINEARS = ATTENTION_LINEARS + MLP_LINEARS


class Optimizer(NamedTuple):
    """How an engine updates the adapters under a recipe."""

    kind: str  # adamw | adam
    schedule: str  # cosine | constant
    bias_correction: bool
    clip: bool


def optimizer(engine: str, recipe: str) -> Optimizer:
    """Say how `engine` ("torch" or "mlx") updates under `recipe`.

    matched: the same in both. published: what the published study used, AdamW with a cosine
    schedule in PyTorch and mlx-lm's plain Adam (no bias correction, no clipping) at a constant rate
    in MLX, so that losses of the two are not comparable.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: {recipe!r} is unknown; allowed are {', '.join(RECIPES)}")
    if recipe == "published" and engine == "mlx":
        return Optimizer("adam", "constant", bias_correction=False, clip=False)
    return Optimizer("adamw", "cosine", bias_correction=True, clip=True)


def learning_rate(
    step: int, *, peak: float, steps: int, warmup_steps: int = 0, schedule: str = "cosine"
) -> float:
    """Return the rate of optimizer step `step` (1-based, of `steps`): warm-up, then half a cosine.

    Neither the first nor the last step is zero (the Hugging Face schedule starts at zero, a step
    that trains nothing): the warm-up reaches the peak at step `warmup_steps`, the cosine would
    reach zero one step after the last. A constant schedule has no warm-up.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"learning_rate: step {step} is outside 1 to {steps}")
    if schedule == "constant":
        return peak
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = (step - max(warmup_steps, 1)) / (steps - max(warmup_steps, 1) + 1)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))


def accumulation(effective_batch: int, micro_batch: int) -> int:
    """Return the number of micro-batches in one optimizer step."""
    if micro_batch < 1 or effective_batch < 1 or effective_batch % micro_batch:
        divisors = [n for n in range(1, effective_batch + 1) if effective_batch % n == 0]
        raise ValueError(
            f"training.micro_batch: {micro_batch} must divide training.effective_batch "
            f"{effective_batch}; allowed are {', '.join(map(str, divisors))}"
        )
    return effective_batch // micro_batch


def lora_shapes(config: Mapping) -> dict[str, tuple[int, int]]:
    """Return {module name: (inputs, outputs)} of the linears that get an adapter: all seven of all
    layers of a Llama-like model (Qwen 2.5, SmolLM2), named as in its checkpoint.

    `config` is the content of the model's config.json.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    queries = heads * head_size
    keys = (config.get("num_key_value_heads") or heads) * head_size
    inner = config["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {
        f"model.layers.{layer}.{name}": size
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }


def check_adapters(
    found: Mapping[str, tuple[int, int]], config: Mapping, rank: int, trainable_parameters: int
) -> None:
    """Raise ValueError unless an engine put its adapters on exactly the modules of `lora_shapes`.

    `found` maps module names to (inputs, outputs) as the engine has them, `trainable_parameters` is
    the engine's own count: both engines passing this train the same number of parameters.
    """
    wanted = lora_shapes(config)
    if dict(found) != wanted:
        odd = sorted(set(found.items()) ^ set(wanted.items()))
        raise ValueError(
            f"the model's linear layers are not those of a Llama-like model: {len(odd)} differ, "
            f"first {odd[0]}; this workflow trains Qwen 2.5 and SmolLM2 shapes"
        )
    count = sum(rank * (inputs + outputs) for inputs, outputs in wanted.values())
    if count != trainable_parameters:
        raise ValueError(
            f"{trainable_parameters} parameters would be trained, expected {count}: the adapters "
            f"alone, at rank {rank}"
        )
