"""LoRA training with MLX: our own loop over mlx-lm's models, quantization and LoRA layers.

The loss lies in `mlx_loss`, the optimizer steps in `mlx_loop`.
"""

import json
from pathlib import Path

from workflow_scripts.lib import initial_adapter, matmul_peak, measure, precision, recipe, training
from workflow_scripts.lib.mlx_loop import train
from workflow_scripts.lib.mlx_loss import evaluate
from workflow_scripts.lib.training import Engine

PACKAGES = ("mlx", "mlx-lm", "numpy")


def load(settings: dict, config: dict) -> Engine:
    """Load the model in its folder with fresh adapters, ready to be trained on one device."""
    import mlx.core as mx
    from mlx_lm.utils import get_total_parameters, load_model

    bits = (config.get("quantization") or {}).get("bits")
    if settings["bits"] != bits:
        raise ValueError(
            f"{settings['model_folder']}: weights of {bits or 16} bits, but the run asks for "
            f"{settings['bits'] or 16}"
        )
    device, dtype = precision.resolve_mlx(
        settings["device"],
        settings["dtype"],
        metal=mx.metal.is_available(),
        cuda=mx.cuda.is_available(),
        bits=bits,
    )
    mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    _set_limits(mx, device)
    mx.random.seed(settings["seed"])
    peak_flops = matmul_peak.mlx_peak_flops(dtype)
    mx.reset_peak_memory()
    model, _ = load_model(Path(settings["model_folder"]), lazy=True)
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    load_peak = mx.get_peak_memory()
    total = get_total_parameters(model)
    lora = settings["lora"]
    start = initial_adapter.read(settings["initial_adapter"], config, lora["r"])
    trainable = add_adapters(model, config, lora["r"], lora["alpha"], start)
    if settings["gradient_checkpointing"]:
        checkpoint_layers(model)
    mx.reset_peak_memory()
    return Engine(
        device=device,
        dtype=dtype,
        loader="mlx-lm",
        packages=PACKAGES,
        trainable_parameters=trainable,
        total_parameters=total + trainable,
        matmul_peak_flops=peak_flops,
        load_peak_bytes=load_peak,
        evaluate=lambda rows: evaluate(model, rows),
        train=lambda plan, recorder, start: train(model, settings, dtype, plan, recorder, start),
        save=lambda folder: save(model, settings, folder),
        memory=measure.mlx_memory,
    )


def _set_limits(mx, device: str) -> None:
    """Keep freed buffers for reuse, up to an eighth of the memory; on Metal keep ours resident.

    mlx-lm empties the cache at every iteration, which costs an allocation for each array of each
    step; without any limit the cache grows with every new shape.
    """
    if device == "cpu":
        mx.set_cache_limit(512 * 2**20)
        return
    about = mx.device_info()
    if size := about.get("memory_size"):
        mx.set_cache_limit(int(size) // 8)
    if device == "metal":
        mx.set_wired_limit(about["max_recommended_working_set_size"])


def add_adapters(model, config: dict, rank: int, alpha: float, start: dict) -> int:
    """Put float32 adapters on all seven linears of all layers, A as in `start` (module name ->
    (rank, inputs), transposed here), B zero, everything else frozen; return the number of trainable
    parameters.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    keys = {name.split(".", 3)[3] for name in recipe.lora_shapes(config)}
    options = {"rank": rank, "scale": alpha / rank, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), options)
    found = adapters(model)
    sizes = {name: (each.lora_a.shape[0], each.lora_b.shape[1]) for name, each in found.items()}
    trainable = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    recipe.check_adapters(sizes, config, rank, trainable)
    for name, module in found.items():
        module.lora_a = mx.array(start[name].T)
        module.lora_b = mx.zeros((rank, sizes[name][1]), dtype=mx.float32)
    mx.eval(model.parameters())
    return trainable


def adapters(model) -> dict:
    """Return {module name as in `recipe.lora_shapes`: mlx-lm's LoRA layer}."""
    from mlx_lm.tuner.lora import LoRALinear

    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def checkpoint_layers(model) -> None:
    """Recompute each decoder layer in the backward pass instead of keeping its activations.

    Changes these layers alone: mlx-lm's own function patches the class, and so every other model
    in the process.
    """
    import mlx.core as mx

    def call(layer, *args, **kwargs):
        plain = type(layer).__mro__[1].__call__

        def inner(parameters, *args, **kwargs):
            layer.update(parameters)
            return plain(layer, *args, **kwargs)

        return mx.checkpoint(inner)(layer.trainable_parameters(), *args, **kwargs)

    kinds: dict[type, type] = {}
    for layer in model.layers:
        kind = type(layer)
        if kind not in kinds:
            kinds[kind] = type(f"Checkpointed{kind.__name__}", (kind,), {"__call__": call})
        layer.__class__ = kinds[kind]


def save(model, settings: dict, folder: Path) -> None:
    """Write the adapter as mlx-lm does, so that `mlx_lm.load(model, adapter_path=)` takes it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    mx.save_safetensors(
        str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    lora = settings["lora"]
    about = {
        "fine_tune_type": "lora",
        "model": settings["model_folder"],
        "num_layers": len(model.layers),
        "lora_parameters": {
            "rank": lora["r"],
            "scale": lora["alpha"] / lora["r"],
            "dropout": 0.0,
            "keys": sorted({name.split(".", 3)[3] for name in adapters(model)}),
        },
    }
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    training.main(load)
