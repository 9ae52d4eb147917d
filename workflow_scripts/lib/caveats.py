"""What a reader must know before comparing runs, each said only where it applies."""

from collections.abc import Sequence
from string import ascii_uppercase

import polars as pl

FEW_TOKENS = 1_000  # of a validation set
FEW_SECONDS = 10  # of a training


def caveats(table: pl.DataFrame) -> list[str]:
    """Return the sentences that apply to these rows of runs, the most important first."""
    done = table.filter(pl.col("status") == "ok")
    rows = done.to_dicts()
    notes = [
        f"{run_name(row)}: implausible. Its rate implies {row['utilization']:.1f} times the "
        "fastest matrix product measured on its device; its speed counts for nothing until "
        "that is explained."
        for row in rows
        if implausible(row)
    ]
    if any(row["dtype"] == "float16" for row in rows):
        notes.append(
            "float16 runs scale the loss by a power of two before the backward pass and the "
            "gradients back before they are checked, clipped and applied: 1,024 at first, half "
            "after a gradient that overflows (that step is skipped), double after 100 clean steps."
        )
    notes += [
        f"{run_name(row)}: {row['skipped_steps']} of {row['optimizer_steps']} optimizer steps were "
        "skipped, because a float16 gradient overflowed at the scale of its loss; the scale was "
        "halved each time."
        for row in rows
        if row["skipped_steps"]
    ]
    notes += [
        f"{run_name(row)}: no rate, since every step saw a row length for the first time; give it "
        "more optimizer_steps."
        for row in rows
        if row["optimizer_steps"] and row["tokens_per_s"] is None
    ]
    return notes + _about_losses(done) + _about_speed(done)


def implausible(row: dict) -> bool:
    """Whether a run claims more arithmetic than its device was measured to be capable of.

    Then its tokens or its times are wrong, or the peak was measured while something else ran.
    """
    return row["utilization"] is not None and row["utilization"] > 1.0


def same_problem(rows: Sequence[dict]) -> list[str]:
    """Return one letter a row: losses compare within a letter, and not across letters.

    A letter stands for the same rows, frozen weights (quantized ones are others) and recipe; under
    `published` the two engines have different optimizers, so each is a problem of its own.
    """
    letters: dict[tuple, str] = {}
    found = []
    for row in rows:
        engine = row["engine"] if row["recipe"] == "published" else None
        weights = (row["model"], row["model_sha256"], row["bits"], row["group_size"])
        key = (row["examples_sha256"], *weights, row["recipe"], engine)
        found.append(letters.setdefault(key, _letters(len(letters))))
    return found


def agreements(rows: Sequence[dict]) -> list[str]:
    """Say how far apart the engines ended on one problem, solved alike: it should be rounding."""
    alike = ("context", "variant", "learning_rate", "optimizer_steps", "effective_batch")
    groups: dict[tuple, list[dict]] = {}
    for row, letter in zip(rows, same_problem(rows), strict=True):
        key = (letter, *(row[field] for field in alike))
        groups.setdefault(key, []).append(row)
    notes = []
    for (letter, *_), found in groups.items():
        losses = [row["val_loss"] for row in found if row["val_loss"]]
        if len({row["engine"] for row in found}) > 1 and len(losses) > 1:
            names = " and ".join(dict.fromkeys(row["backend"] for row in found))
            apart = 100 * (max(losses) / min(losses) - 1)
            share = "less than 0.001" if apart < 0.001 else f"{apart:.2g}"
            notes.append(
                f"Problem {letter}, {found[0]['variant']}: {names} end {share}% apart in loss, "
                "on the same rows, weights, start and recipe."
            )
    return notes


def run_name(row: dict) -> str:
    """A run as people name it in a sentence."""
    return f"{row['backend']}, {row['model']}, {row['context']} tokens ({row['variant']})"


def _about_losses(done: pl.DataFrame) -> list[str]:
    notes = []
    sizes = done.select("val_tokens", "val_rows").drop_nulls()
    if sizes.height and (fewest := min(sizes.rows()))[0] < FEW_TOKENS:
        notes.append(
            "Validation is over only {} supervised tokens in {} rows: small differences in loss "
            "mean nothing.".format(*fewest)
        )
    if done.select(pl.struct("bits", "group_size").n_unique()).item() > 1:
        notes.append(
            "Quantized runs start from other weights than whole ones, so their losses stand on "
            "another base."
        )
    recipes = set(done["recipe"])
    if len(recipes) > 1:
        notes.append("Runs differ in recipe: losses of different recipes are not comparable.")
    if "published" in recipes and done.filter(recipe="published")["engine"].n_unique() > 1:
        notes.append(
            "Under recipe `published` the engines use different optimizers (AdamW with a cosine in "
            "PyTorch, plain Adam at a constant rate in MLX): their losses are not comparable."
        )
    if done["examples_sha256"].n_unique() > 1:
        notes.append(
            "Losses at different contexts or tokenizers are over different rows, and not "
            "comparable."
        )
    weights = done.select("model", "bits", "group_size", "model_sha256").unique()
    changed = weights.filter(weights.drop("model_sha256").is_duplicated())
    notes += [
        f"Runs of {model} stand on different weights: its files changed between them."
        for model in sorted(set(changed["model"]))
    ]
    if done["model"].n_unique() > 1:
        notes.append(
            "Losses of different models say which model fits these rows better, nothing about an "
            "engine."
        )
    return notes


def _about_speed(done: pl.DataFrame) -> list[str]:
    notes = []
    if done.filter(pl.col("train_seconds").cast(pl.Float64, strict=False) < FEW_SECONDS).height:
        notes.append(
            f"Some runs trained for less than {FEW_SECONDS} s: whatever else the machine did then "
            "moves their speed."
        )
    if done.filter((pl.col("device") == "cpu") & (pl.col("engine") == "mlx")).height:
        notes.append(
            "MLX ran on its CPU build, which says nothing about a Mac's GPU: compare learning "
            "here, not speed."
        )
    if done.select(pl.struct("chip", "os").n_unique()).item() > 1:
        notes.append("Runs were measured on different machines: their speeds are not comparable.")
    if done["effective_batch"].n_unique() > 1 or done["micro_batch"].n_unique() > 1:
        notes.append(
            "Runs differ in rows a step or a micro-batch: compare tokens per second, not steps."
        )
    if done["gradient_checkpointing"].n_unique() > 1:
        notes.append(
            "Some runs recompute activations (gradient checkpointing), which costs time and saves "
            "memory."
        )
    return notes


def _letters(number: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, len(ascii_uppercase))
        text = ascii_uppercase[digit] + text
    return text
