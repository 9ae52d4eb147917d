"""Rule draw_adapter: a model's shape, a rank and a seed -> where LoRA starts, for both engines."""

from pathlib import Path

from workflow_scripts.lib import initial_adapter, joblog
from workflow_scripts.lib.jsonl import read_json


def draw_adapter(
    model_folder: str | Path, adapter_file: str | Path, rank: int = 16, seed: int = 0
) -> None:
    """Write the initial A matrices of every adapted module of the model, as float32.

    The same shape, rank and seed give the same file, so that a model and its quantized form start
    alike.
    """
    config = read_json(Path(model_folder) / "config.json")
    matrices = initial_adapter.draw(config, rank, seed)
    initial_adapter.write(adapter_file, matrices)
    joblog.say(f"{adapter_file}: {len(matrices)} matrices of rank {rank}, seed {seed}")


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        draw_adapter(
            model_folder=snakemake.input.model,
            adapter_file=snakemake.output.adapter,
            rank=int(snakemake.wildcards.rank),
            seed=int(snakemake.wildcards.seed),
        )
