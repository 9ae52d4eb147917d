"""Rule tokenize_and_mask: split conversations -> token rows with masks, for both engines alike."""

import hashlib
from pathlib import Path

from workflow_scripts.lib import joblog, jsonl, template_proof
from workflow_scripts.lib.examples import Choices, Tally, examples_of, figures_of
from workflow_scripts.lib.windows import SMALLEST_CONTEXT


def tokenize_and_mask(
    train_file: str | Path,
    val_file: str | Path,
    tokenizer_folder: str | Path,
    train_examples: str | Path,
    val_examples: str | Path,
    stats_file: str | Path,
    context: int,
    strategy: str = "windows",
    overlong: str = "cut",
    repeated_context: float = 0.25,
    thinking: str = "drop",
    tools: bool = False,
    tool_result_tokens: int | None = None,
    system_prompt: str = "record",
) -> None:
    """Write the rows of both splits, at most `context` tokens each, and their figures.

    strategy: "windows" or "turns", with `repeated_context` (a share of the context) for the one and
    `overlong` ("cut" or "drop") for the other; see lib/windows.py. thinking: "drop" or "keep".
    tools: put the record's tools into the system prompt. tool_result_tokens: longer results are cut
    in the middle. system_prompt: "record", or "default" for the template's own in its place.
    A validation row that is also a training row is dropped. Raises ValueError for a template that
    can't be followed, and for a split without rows.
    """
    if context < SMALLEST_CONTEXT:
        raise ValueError(f"context: {context} is below {SMALLEST_CONTEXT}, the smallest that works")
    choices = Choices(
        context=context,
        strategy=strategy,
        overlong=overlong,
        repeated_context=repeated_context,
        thinking=thinking,
        tools=tools,
        tool_result_tokens=tool_result_tokens,
        system_prompt=system_prompt,
    )
    chat, coder = template_proof.load_chat(tokenizer_folder, thinking, tools)
    joblog.say(f"{tokenizer_folder}: masks proven, an assistant's turn ends on {chat.format.end}")
    tokenizer = Path(tokenizer_folder, "tokenizer.json").read_bytes()
    stats = {"tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(), **choices._asdict()}
    marks: set[bytes] = set()
    for split, source, target in (
        ("train", train_file, train_examples),
        ("val", val_file, val_examples),
    ):
        tally = Tally()
        records = joblog.track(jsonl.read_jsonl(source), f"{split}: conversations")
        jsonl.write_jsonl(target, examples_of(records, chat, coder, choices, tally, known=marks))
        marks = tally.marks
        stats[split] = figures_of(tally, context)
        if not tally.supervised_tokens:
            raise ValueError(
                f"{source}: no row with a supervised token among {tally.conversations} "
                f"conversations (dropped: {dict(tally.dropped) or 'nothing'}); take a larger "
                "context, `overlong: cut`, or more sessions"
            )
        joblog.say(
            "{}: {rows} rows, {tokens} tokens, {supervised_tokens} of them supervised".format(
                split, **stats[split]
            )
        )
    jsonl.write_json(stats_file, stats)


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        tokenize_and_mask(
            train_file=snakemake.input.train,
            val_file=snakemake.input.val,
            tokenizer_folder=snakemake.input.tokenizer,
            train_examples=snakemake.output.train,
            val_examples=snakemake.output.val,
            stats_file=snakemake.output.stats,
            context=int(snakemake.wildcards.context),
            **snakemake.params.masking,
        )
