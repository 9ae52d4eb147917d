"""Rule split_sessions: conversations -> training and validation conversations, by family."""

from pathlib import Path

from workflow_scripts.lib import families, joblog, jsonl


def split_sessions(
    conversations_file: str | Path,
    train_file: str | Path,
    val_file: str | Path,
    val_rows: int,
    seed: int,
) -> None:
    """Split conversations so that no family of sessions is on both sides.

    val_rows: wished supervised turns in the validation set, at most a tenth of all.
    Raises ValueError where there are fewer than two families.
    """
    found = families.families_of(jsonl.read_jsonl(conversations_file), seed)
    chosen = families.validation_sessions(found, val_rows)
    counts = {}
    for side, path in (("train", train_file), ("val", val_file)):
        counts[side] = jsonl.write_jsonl(
            path,
            (
                record
                for record in jsonl.read_jsonl(conversations_file)
                if (record["session"] in chosen) == (side == "val")
            ),
        )
    turns = {"val": 0, "train": 0}
    for family in found:
        turns["val" if family.sessions <= chosen else "train"] += family.supervised_turns
    joblog.say(
        f"{len(found)} families of sessions: "
        f"{counts['train']} conversations ({turns['train']} supervised turns) to train, "
        f"{counts['val']} ({turns['val']}) to validate"
    )


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        split_sessions(
            snakemake.input.conversations,
            snakemake.output.train,
            snakemake.output.val,
            **snakemake.params.split,
        )
