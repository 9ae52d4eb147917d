"""One LoRA training run with MLX: from a model and examples to a row and an adapter."""

from workflow_scripts.lib import joblog
from workflow_scripts.lib.launch import train_and_publish

TRAINER = "workflow_scripts.lib.mlx_lora"

if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        train_and_publish(
            TRAINER,
            settings=snakemake.params.run,
            limits=snakemake.params.limits,
            model_folder=snakemake.input.model,
            initial_adapter=snakemake.input.initial_adapter,
            train_file=snakemake.input.train,
            val_file=snakemake.input.val,
            code=snakemake.input.code,
            state_folder=snakemake.params.state,
            row_file=snakemake.output.row,
            steps_file=snakemake.output.steps,
            memory_file=snakemake.output.memory,
            adapter_folder=snakemake.output.adapter,
            log_file=snakemake.log[0],
        )
