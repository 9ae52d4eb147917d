"""The summary's tables: what their columns are called, in which units, and what they mean."""

from typing import NamedTuple

MEGA = 1e6

Columns = dict[str, tuple[str, float | None]]  # heading -> field of a row, factor (None: a count)


class Section(NamedTuple):
    """A table of the summary, and what its readers must know."""

    title: str
    text: str
    columns: Columns


SPEED = Section(
    "Speed",
    "All rates come from one measured time per optimizer step, the device synchronized. Left out: "
    "steps that saw a row length for the first time, evaluation, and saving. Real tokens leave out "
    "padding, padded tokens are all that was computed. Utilization is the arithmetic done on "
    "padded tokens, over the fastest matrix product measured on the same device and in the same "
    "number format when the run began (peak).",
    {
        "real tokens/s": ("tokens_per_s", 1),
        "padded tokens/s": ("padded_tokens_per_s", 1),
        "supervised tokens/s": ("supervised_tokens_per_s", 1),
        "sequences/s": ("sequences_per_s", 1),
        "micro-batches/s": ("micro_batches_per_s", 1),
        "optimizer steps/s": ("optimizer_steps_per_s", 1),
        "utilization (%)": ("utilization", 100),
        "peak (TFLOP/s)": ("matmul_peak_flops", 1e-12),
    },
)
TIME = Section(
    "Time",
    "First shapes is what the first step of each row length took above the median step: engines "
    "compile there.",
    {
        "median step (s)": ("step_seconds_p50", 1),
        "95% of steps below (s)": ("step_seconds_p95", 1),
        "first shapes (s)": ("compile_seconds", 1),
        "training (s)": ("train_seconds", 1),
        "evaluation (s)": ("evaluation_seconds", 1),
        "whole run (s)": ("wall_seconds", 1),
        "shapes (count)": ("distinct_shapes", None),
    },
)
OTHER_TOOLS = Section(
    "In other tools' units",
    "The same measured times as TRL and mlx-lm would count them. They do not compare: TRL's "
    "iteration is an optimizer step, that of mlx-lm a micro-batch, whatever rows each holds, and "
    "tokens in mlx-lm are the supervised ones alone.",
    {
        "TRL it/s": ("optimizer_steps_per_s", 1),
        "TRL samples/s": ("sequences_per_s", 1),
        "mlx-lm It/sec": ("micro_batches_per_s", 1),
        "mlx-lm Tokens/sec": ("supervised_tokens_per_s", 1),
        "rows per TRL it": ("effective_batch", None),
        "rows per mlx-lm It": ("micro_batch", None),
    },
)
MEMORY = Section(
    "Memory",
    "1 MB is 1,000,000 bytes. Device peak is what the engine itself counted; empty where it counts "
    "nothing.",
    {
        "process peak (MB)": ("peak_process_bytes", 1 / MEGA),
        "device peak (MB)": ("peak_device_bytes", 1 / MEGA),
    },
)
LEARNING = Section(
    "Learning",
    "Loss and accuracy over every supervised token of the validation rows, each row once, before "
    "and after training. Losses compare within one letter of `problem` alone: the same rows, the "
    "same frozen weights (4-bit weights are others), the same recipe.",
    {
        "steps": ("optimizer_steps", None),
        "loss before": ("val_loss_before", 1),
        "loss after": ("val_loss", 1),
        "accuracy before (%)": ("val_token_accuracy_before", 100),
        "accuracy after (%)": ("val_token_accuracy", 100),
        "trained tokens (supervised)": ("trained_supervised_tokens", None),
        "validation rows": ("val_rows", None),
        "validation tokens": ("val_tokens", None),
    },
)
_ALL = SPEED.columns | TIME.columns | MEMORY.columns | LEARNING.columns
MAIN: Columns = {
    heading: _ALL[heading]
    for heading in (
        "loss before",
        "loss after",
        "accuracy after (%)",
        "real tokens/s",
        "supervised tokens/s",
        "process peak (MB)",
        "whole run (s)",
    )
}
