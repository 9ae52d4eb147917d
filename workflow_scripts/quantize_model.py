"""Rule quantize_model: a model folder -> the same model, quantized as mlx-lm does it."""

import shutil
from pathlib import Path

from workflow_scripts.lib import folders, joblog

WEIGHTS = (".safetensors", ".safetensors.index.json")


def quantize_model(
    model_folder: str | Path, quantized_folder: str | Path, bits: int = 4, group_size: int = 64
) -> None:
    """Quantize all linear and embedding weights, by mlx-lm's own function.

    The tokenizer's files are copied byte for byte, so that examples made with it stay valid.
    Raises ValueError where MLX is not installed, or the rows of a weight are no multiple of the
    group: mlx-lm would silently leave that weight whole.
    """
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise ValueError(
            f"quantizing needs MLX and mlx-lm ({error}); install the `mlx` extra of the project, "
            "or leave out the runs with `bits`"
        ) from None
    source = Path(model_folder)
    model, config = utils.load_model(source, lazy=True)
    if "quantization" in config:
        raise ValueError(f"{source}: is quantized already; run it without `bits`")
    uneven = [
        f"{name} ({module.weight.shape[-1]})"
        for name, module in model.named_modules()
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size
    ]
    if uneven:
        raise ValueError(
            f"group_size: {group_size} does not divide the width of {len(uneven)} weights of "
            f"{source}, such as {uneven[0]}; take 32, or a model of another shape"
        )
    model, config = utils.quantize_model(model, config, group_size=group_size, bits=bits)
    with folders.atomic_folder(quantized_folder) as folder:
        utils.save_model(folder, model, donate_model=True)
        utils.save_config(config, config_path=folder / "config.json")
        for file in sorted(source.iterdir()):
            if not (folder / file.name).exists() and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    joblog.say(f"{quantized_folder}: {bits} bits, groups of {group_size}")


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        quantize_model(
            model_folder=snakemake.input.model,
            quantized_folder=snakemake.output.quantized,
            bits=int(snakemake.wildcards.bits),
            group_size=snakemake.params.group_size,
        )
