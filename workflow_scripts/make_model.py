"""Make a Qwen 2 model of a given shape, its tokenizer trained on the study's training sessions."""

import json
from collections.abc import Iterator
from pathlib import Path

from workflow_scripts.lib import folders, joblog, jsonl, tiny_model


def make_model(
    model_folder: str | Path,
    corpus_file: str | Path,
    vocabulary: int = 4096,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    embedding_rows: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    embedding_std: float = 0.1,
    max_position_embeddings: int = 32768,
) -> None:
    """Write a Hugging Face model folder with seeded weights.

    The tokenizer learns from the conversations of `corpus_file` (train.jsonl). `embedding_rows` is
    the embedding's height where it is to be larger than the vocabulary, as in Qwen 2.5. Raises
    ValueError for shapes that don't divide and for an empty corpus.
    """
    rows = embedding_rows or vocabulary
    if rows < vocabulary:
        raise ValueError(f"embedding_rows: {rows} is below the vocabulary ({vocabulary})")
    if not any(True for _ in texts_of(corpus_file)):
        raise ValueError(f"{corpus_file}: no text to train a tokenizer on; see sessions/stats.json")
    tokenizer = tiny_model.train_tokenizer(texts_of(corpus_file), vocabulary)
    end, pad = tokenizer.token_to_id(tiny_model.END), tokenizer.token_to_id(tiny_model.PAD)
    with folders.atomic_folder(model_folder) as folder:
        tiny_model.write_tokenizer(folder, tokenizer, max_position_embeddings)
        tiny_model.write_weights(
            folder,
            end,
            pad,
            vocab_size=rows,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
            seed=seed,
            embedding_std=embedding_std,
        )
    joblog.say(f"{model_folder}: {tokenizer.get_vocab_size()} tokens, {rows} embedding rows")


def texts_of(corpus_file: str | Path) -> Iterator[str]:
    """Yield the texts of the turns, and tool calls as JSON, as a chat template would show them."""
    for conversation in jsonl.read_jsonl(corpus_file):
        for turn in conversation["turns"]:
            if turn["text"]:
                yield turn["text"]
            for call in turn.get("calls", ()):
                yield json.dumps(
                    {"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False
                )


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        make_model(
            model_folder=snakemake.output.model,
            corpus_file=snakemake.input.sessions,
            **snakemake.params.shape,
        )
