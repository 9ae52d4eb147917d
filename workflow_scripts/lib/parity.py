"""Do PyTorch and MLX solve the same problem here? Checked on the CPU, before a study trusts them.

One tiny Qwen 2 model in float32, rows of several turns with padding and unequal numbers of
supervised tokens. Adapters have a random B where gradients are compared, since with B = 0 every
gradient of A is zero; trainings start from B = 0, through the same code as every run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workflow_scripts.lib import (
    batches,
    mlx_loop,
    mlx_lora,
    mlx_loss,
    tiny_problem,
    torch_lora,
    torch_loss,
    training,
)
from workflow_scripts.lib.batches import Batch, Examples

LOSS, GRADIENT, TRAINED = 1e-5, 1e-4, 1e-3
RANK, ALPHA, CHUNK, ROWS = 8, 16, 32, 6
SPLITS = {"1 x 4": [[0, 1, 2, 3]], "2 x 2": [[0, 1], [2, 3]], "4 x 1": [[0], [1], [2], [3]]}

Matrices = Mapping[tuple[str, str], np.ndarray]  # (module, "a" or "b") -> as PEFT has it


class Check(NamedTuple):
    """How far apart two sides are that must agree, and how far they may be."""

    what: str
    found: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether they agree; a figure that isn't finite never does."""
        return self.found <= self.allowed


class Side(NamedTuple):
    """One engine with a model whose adapters do something."""

    evaluate: Callable[[Sequence[Batch]], tuple[float, int]]
    gradients: Callable[[Sequence[Batch]], tuple[float, Matrices]]  # summed over micro-batches


def checks(folder: Path) -> Iterator[Check]:
    """Make the problem in an empty folder and yield each check as it is done.

    Losses and gradients compare by relative distance, a gradient and an adapter as the largest over
    all matrices of |ours - theirs| / |theirs|; counts by their difference.
    """
    whole = tiny_problem.make_model(folder / "model")
    own_head = tiny_problem.make_model(folder / "own-head", tie_word_embeddings=False)
    quantized = tiny_problem.quantize(whole, folder / "model-4bit")
    dequantized = tiny_problem.dequantize(quantized, folder / "dequantized", whole)
    rows = tiny_problem.write_rows(folder / "rows.jsonl", tiny_problem.make_rows(ROWS))
    examples = batches.read_examples(rows, tiny_problem.CONTEXT)
    for name, torch_folder, mlx_folder in (
        ("tied head", whole, whole),
        ("own head", own_head, own_head),
        ("4 bit on dequantized weights", dequantized, quantized),
    ):
        sides = torch_side(torch_folder), mlx_side(mlx_folder)
        yield from same_losses(name, *sides, examples)
        if name == "tied head":
            for engine, side in zip(("torch", "mlx"), sides, strict=True):
                yield from same_splits(engine, side, examples)
    for steps in (1, 20):
        yield from same_trainings(folder, whole, steps)


def same_losses(name: str, ours: Side, theirs: Side, examples: Examples) -> Iterator[Check]:
    """Loss and right predictions of each row alone, gradients of rows of unequal length at once."""
    alone = [[batch_of(examples, [row])] for row in range(len(examples))]
    pairs = [(ours.evaluate(row), theirs.evaluate(row)) for row in alone]
    apart = max(relative(loss, other) for (loss, _), (other, _) in pairs)
    yield Check(f"{name}: loss of each row", apart, LOSS)
    wrong = sum(abs(correct - other) for (_, correct), (_, other) in pairs)
    yield Check(f"{name}: right predictions of each row", wrong, 0)
    together = [batch_of(examples, [0, 1, 2])]
    loss, gradients = ours.gradients(together)
    other, other_gradients = theirs.gradients(together)
    yield Check(f"{name}: loss of three rows at once", relative(loss, other), LOSS)
    yield Check(f"{name}: gradient of each matrix", distance(gradients, other_gradients), GRADIENT)


def same_splits(engine: str, side: Side, examples: Examples) -> Iterator[Check]:
    """The same rows through other micro-batches: "2 x 2" is two micro-batches of two rows."""
    made = {
        split: side.gradients([batch_of(examples, rows) for rows in parts])
        for split, parts in SPLITS.items()
    }
    loss, gradients = made.pop("1 x 4")
    for split, (other, other_gradients) in made.items():
        name = f"{engine}: {split} against 1 x 4"
        yield Check(f"{name}, loss", relative(other, loss), LOSS)
        yield Check(f"{name}, gradients", distance(other_gradients, gradients), GRADIENT)


def same_trainings(folder: Path, model: Path, steps: int) -> Iterator[Check]:
    """Both engines through the whole frame from B = 0, with clipping and decay at work.

    Epsilon is 1e-5: Adam's first step is the gradient over its own size, so that with 1e-8 an
    element whose gradient is rounding noise takes a full step in either direction. For the same
    reason adapters are held to 1e-3, not to the 1e-4 of gradients, after the first step too: they
    were 1.3e-4 apart there, nearly all of it one element whose gradient is almost zero (1.3e-3 at
    an epsilon of 1e-6), and 4e-5 after 20 steps.
    """
    runs, results, lines = {}, {}, {}
    for engine, module in (("torch", torch_lora), ("mlx", mlx_lora)):
        settings = tiny_problem.settings(
            folder, model, engine, str(steps), optimizer_steps=steps, epsilon=1e-5
        )
        results[engine] = training.run(settings, module.load)
        if results[engine]["status"] != "ok":
            raise ValueError(f"{engine}: {results[engine]['status']}: {results[engine]['reason']}")
        lines[engine] = tiny_problem.steps_of(settings)
        runs[engine] = Path(settings["state_folder"]) / "adapter"
    name = f"{steps} optimizer step{'s' if steps > 1 else ''}"
    ours, theirs = lines["torch"], lines["mlx"]
    differing = abs(len(ours) - steps) + abs(len(theirs) - steps)
    for key in ("learning_rate", "tokens", "supervised_tokens", "padded_tokens"):
        differing += sum(one[key] != two[key] for one, two in zip(ours, theirs, strict=False))
    yield Check(f"{name}: rates and tokens of each step", differing, 0)
    # Step 2 is the first whose loss depends on an update.
    allowed = LOSS if steps == 1 else TRAINED
    for key in ("loss", "grad_norm"):
        apart = max(relative(a[key], b[key]) for a, b in zip(ours, theirs, strict=False))
        yield Check(f"{name}: {key} of each step", apart, allowed)
    for when, key, allowed in (("before", "val_loss_before", LOSS), ("after", "val_loss", TRAINED)):
        apart = relative(results["torch"][key], results["mlx"][key])
        yield Check(f"{name}: validation loss {when}", apart, allowed)
    right = (results[engine]["val_token_accuracy"] for engine in ("torch", "mlx"))
    yield Check(f"{name}: token accuracy after", abs(next(right) - next(right)), 0.01)
    yield Check(
        f"{name}: each adapter matrix",
        distance(_saved_by_mlx(runs["mlx"]), _saved_by_torch(runs["torch"])),
        TRAINED,
    )


def batch_of(examples: Examples, rows: Sequence[int]) -> Batch:
    """Return some rows of the problem as one micro-batch."""
    return batches.make_batch(examples, rows, tiny_problem.CONTEXT, CHUNK)


def random_b(module: str, outputs: int) -> np.ndarray:
    """Return a B that is not zero, float32 (outputs, rank), from the module's name alone."""
    generator = np.random.default_rng(list(module.encode()))
    return generator.normal(0, 0.05, (outputs, RANK)).astype(np.float32)


def torch_side(folder: Path) -> Side:
    """Load a model folder in PyTorch, float32 on the CPU, adapters with a random B."""
    import torch
    from transformers import AutoModelForCausalLM

    config, start = tiny_problem.model_config(folder), tiny_problem.start(folder, RANK)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = torch_lora.add_adapters(model, config, RANK, ALPHA, start)
    found = {
        (name, which): getattr(module, f"lora_{which.upper()}")["default"].weight
        for name, module in torch_lora.adapters(model).items()
        for which in "ab"
    }
    with torch.no_grad():
        for (name, which), weight in found.items():
            if which == "b":
                weight.copy_(torch.from_numpy(random_b(name, len(weight))))

    def gradients(micro_batches: Sequence[Batch]) -> tuple[float, Matrices]:
        model.zero_grad()
        total = 0.0
        for batch in micro_batches:
            loss, _ = torch_loss.batch_loss(model, *torch_loss.to_device(batch, "cpu"))
            loss.backward()
            total += loss.item()
        return total, {key: weight.grad.numpy().copy() for key, weight in found.items()}

    return Side(lambda rows: torch_loss.evaluate(model, "cpu", rows), gradients)


def mlx_side(folder: Path) -> Side:
    """Load a model folder in MLX, float32 on the CPU, adapters with the same random B."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    config, start = tiny_problem.model_config(folder), tiny_problem.start(folder, RANK)
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    mlx_lora.add_adapters(model, config, RANK, ALPHA, start)
    for name, module in mlx_lora.adapters(model).items():
        module.lora_b = mx.array(random_b(name, module.lora_b.shape[1]).T)

    def gradients(micro_batches: Sequence[Batch]) -> tuple[float, Matrices]:
        parameters = model.trainable_parameters()
        sums = (mx.array(0.0), mx.array(0.0), tree_map(mx.zeros_like, parameters))
        add = mlx_loop.micro_step(model)
        for batch in micro_batches:
            sums = add(parameters, sums, mx.array(1.0), *mlx_loss.to_device(batch))
        return sums[0].item(), _as_peft(
            {key: np.array(value) for key, value in tree_flatten(sums[2])}
        )

    return Side(lambda rows: mlx_loss.evaluate(model, rows), gradients)


def _as_peft(matrices: Mapping[str, np.ndarray]) -> Matrices:
    """Rename and transpose the matrices of an mlx-lm adapter."""
    parts = {key: key.rpartition(".lora_") for key in matrices}
    return {(name, which): matrices[key].T for key, (name, _, which) in parts.items()}


def _saved_by_mlx(folder: Path) -> Matrices:
    from safetensors.numpy import load_file

    return _as_peft(load_file(folder / "adapters.safetensors"))


def _saved_by_torch(folder: Path) -> Matrices:
    from safetensors.numpy import load_file

    saved = load_file(folder / "adapter_model.safetensors")
    keys = {key: key.removeprefix("base_model.model.").split(".lora_") for key in saved}
    return {(name, rest[0].lower()): saved[key] for key, (name, rest) in keys.items()}


def relative(found: float, wanted: float) -> float:
    """Return |found - wanted| / |wanted|."""
    return abs(found - wanted) / abs(wanted)


def distance(found: Matrices, wanted: Matrices) -> float:
    """Return the largest relative distance over all matrices, by their norms.

    Infinite where one side lacks a matrix, or one is zero: then nothing was compared.
    """
    if found.keys() != wanted.keys() or not all(map(np.linalg.norm, wanted.values())):
        return float("inf")
    return max(
        float(np.linalg.norm(found[key] - wanted[key]) / np.linalg.norm(wanted[key]))
        for key in wanted
    )
