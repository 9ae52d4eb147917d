"""How much arithmetic a LoRA step is: multiplications and additions of its matrix products."""

from collections.abc import Callable, Mapping

from workflow_scripts.lib import recipe
from workflow_scripts.lib.batches import Batch


def counter(config: Mapping, rank: int, checkpointing: bool) -> Callable[[Batch], float]:
    """Return a function that counts the FLOP of forward and backward pass over one micro-batch.

    `config` is the content of the model's config.json, `rank` that of LoRA, `checkpointing` whether
    each layer is computed a second time in the backward pass.

    A product of (m, k) and (k, n) is 2mkn FLOP, and its gradient twice that, half for each factor.
    Frozen weights need no gradient of their own, which leaves, for a linear layer of N = inputs x
    outputs weights, r = rank, a row of T tokens and Q = heads x head size:

    - linear layers: 2N forward, 2N for the gradient of the input, a token;
    - adapters: 2r(inputs + outputs) forward, twice that backward, a token;
    - attention: scores and weighted sum are 2TQ each, together 4TQ forward and 8TQ backward, a
      token. The whole square is counted as usual, though half of it is masked, and no second
      computation of the scores, which is the kernel's own affair;
    - output head of V x hidden weights: 2 V hidden forward and as much backward for a supervised
      position, nothing for any other; the filling of its last chunk is not counted;
    - checkpointing: one more forward pass of all layers, without the head;
    - less: queries, keys and values of the first layer need no gradient of their input, which is
      the frozen embedding, unless checkpointing asks for one.

    Embedding, norms, rotations and activations multiply no matrices and are left out. T is the
    padded length, since padding is computed like anything else. This is the count of Kaplan et al.
    2020 (arXiv:2001.08361, section 2.1) and of PaLM (arXiv:2204.02311, appendix B), without the
    gradients of frozen weights; with recomputation it is PaLM's hardware utilization.
    """
    shapes = recipe.lora_shapes(config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = shapes["model.layers.0.self_attn.q_proj"][1]
    first = [shapes[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    linear = sum(2 * inputs * outputs for inputs, outputs in shapes.values())
    adapter = sum(2 * rank * (inputs + outputs) for inputs, outputs in shapes.values())
    square = 4 * queries * layers  # times the row's length
    head = 4 * config["vocab_size"] * hidden
    forwards = 2 if checkpointing else 1
    unneeded = sum(2 * inputs * (outputs + rank) for inputs, outputs in first)
    if checkpointing:
        unneeded = 0

    def count(batch: Batch) -> float:
        tokens, length = batch.input_ids.size, batch.input_ids.shape[1]
        forward = linear + adapter + square * length
        backward = linear + 2 * adapter + 2 * square * length - unneeded
        return float(tokens * (forwards * forward + backward) + batch.supervised * head)

    return count


def utilization(
    flops_per_token: float | None, padded_tokens_per_s: float | None, peak_flops: float | None
) -> float | None:
    """Return the share of the measured peak that a training used, None where a part is unknown.

    `flops_per_token` is FLOP per computed token, padding included, so the rate is that of computed
    tokens too: the product is what the device really did.
    """
    if not flops_per_token or not padded_tokens_per_s or not peak_flops:
        return None
    return flops_per_token * padded_tokens_per_s / peak_flops
