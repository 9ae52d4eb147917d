"""The training loop in MLX: a compiled micro-step, then one checked update per optimizer step."""

import math
from collections.abc import Mapping

import numpy as np

from workflow_scripts.lib import measure, precision, recipe
from workflow_scripts.lib.batches import Plan
from workflow_scripts.lib.checkpoints import Tensors
from workflow_scripts.lib.mlx_loss import batch_loss, to_device
from workflow_scripts.lib.recorder import Recorder


def micro_step(model):
    """Return a compiled function (parameters, sums, scale, *batch) -> sums that adds summed loss,
    right predictions and scaled gradients of a micro-batch; MLX keeps one graph per shape.

    The trainable parameters go in as an argument and are put back after the call, because tracing
    leaves placeholders of them in the model.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    def value(parameters, scale, *batch):
        model.update(parameters)
        value, loss, correct = batch_loss(model, *batch)
        return value * scale, loss, correct

    @mx.compile
    def traced(parameters, sums, scale, *batch):
        (_, loss, correct), gradients = mx.value_and_grad(value)(parameters, scale, *batch)
        return sums[0] + loss, sums[1] + correct, tree_map(mx.add, sums[2], gradients)

    def step(parameters, sums, scale, *batch):
        sums = traced(parameters, sums, scale, *batch)
        model.update(parameters)
        return sums

    return step


def train(
    model,
    settings: dict,
    dtype: str,
    plan: Plan,
    recorder: Recorder,
    start: Tensors | None = None,
) -> None:
    """Carry out the plan, each optimizer step into `recorder`.

    `start` is the checkpoint to go on from; the recorder then has the steps made before, and the
    plan those that are left.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    update = recipe.optimizer("mlx", settings["recipe"])
    adam = make_optimizer(update, settings)
    scale = precision.LossScale.for_dtype(dtype)
    if start:
        model.update(to_tree(start["adapter"]))
        adam.state = to_tree(start["optimizer"])
        scale.restore(start["loss_scale"])
        high, low = start["random"]["key"].tolist()
        mx.random.seed(high << 32 | low)  # the only way in: a seed becomes the key's two halves
    else:
        adam.init(model.trainable_parameters())
    recorder.snapshot = lambda: {
        "adapter": to_host(model.trainable_parameters()),
        "optimizer": to_host(adam.state),
        "loss_scale": scale.as_arrays(),
        "random": {"key": np.array(mx.random.state[0])},
    }
    parameters = model.trainable_parameters()
    zeros = tree_map(mx.zeros_like, parameters)
    add = micro_step(model)
    clock = measure.StepClock(mx.synchronize)
    model.train()

    @mx.compile
    def average(gradients, divisor):
        gradients = tree_map(lambda g: g / divisor, gradients)
        squares = [g.square().sum() for _, g in tree_flatten(gradients)]
        return gradients, mx.sqrt(mx.stack(squares).sum())

    for number, rows in enumerate(plan.order, start=len(recorder.steps) + 1):
        clock.start()
        micro_batches = [plan.batch(part) for part in rows]
        tokens = sum(batch.supervised for batch in micro_batches)
        sums = (mx.array(0.0), mx.array(0.0), zeros)
        for batch in micro_batches:
            recorder.raise_if_stopped()
            sums = add(parameters, sums, mx.array(scale.value), *to_device(batch))
            mx.async_eval(sums)  # one after the other: all at once would keep all activations
        gradients, norm = average(sums[2], mx.array(tokens * scale.value))
        mx.eval(gradients, norm)
        loss, correct, norm = sums[0].item() / tokens, sums[1].item(), norm.item()
        rate = recipe.learning_rate(
            number,
            peak=settings["learning_rate"],
            steps=settings["optimizer_steps"],
            warmup_steps=settings["warmup_steps"],
            schedule=update.schedule,
        )
        if math.isfinite(loss) and scale.skips(math.isfinite(norm)):
            norm = None
        else:
            recorder.check(loss, norm)
            limit = settings["max_grad_norm"]
            if update.clip and limit and norm > limit:
                gradients = tree_map(lambda g, by=limit / (norm + 1e-6): g * by, gradients)
            adam.learning_rate = rate
            parameters = adam.apply_gradients(gradients, parameters)
            mx.eval(parameters, adam.state)
            model.update(parameters)
        recorder.record(
            loss, correct, rate, norm, clock.stop(), micro_batches, mx.get_active_memory()
        )


def to_host(tree) -> dict[str, np.ndarray]:
    """Copy a tree of arrays to the host, as dotted name -> array."""
    from mlx.utils import tree_flatten

    return {name: np.array(value) for name, value in tree_flatten(tree)}


def to_tree(arrays: Mapping[str, np.ndarray]):
    """Return the tree that `to_host` flattened."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    return tree_unflatten([(name, mx.array(array)) for name, array in arrays.items()])


def make_optimizer(update: recipe.Optimizer, settings: dict):
    """Return mlx's optimizer of the recipe; its AdamW corrects no bias unless told to."""
    from mlx import optimizers

    options = {
        "learning_rate": settings["learning_rate"],
        "betas": settings["betas"],
        "eps": settings["epsilon"],
        "bias_correction": update.bias_correction,
    }
    if update.kind == "adam":
        return optimizers.Adam(**options)
    return optimizers.AdamW(**options, weight_decay=settings["weight_decay"])
