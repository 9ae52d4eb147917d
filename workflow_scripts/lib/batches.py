"""Examples as compact arrays, and the batches that both engines read: same rows, order, padding.

The positions of the supervised tokens are computed here, on the host, so that no engine needs
boolean indexing or scores a position without a label.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workflow_scripts.lib import recipe

IGNORED = -100  # label of a position that is not supervised
LENGTHS = 4  # padded lengths per context at most: engines keep one graph per shape


class Examples(NamedTuple):
    """Rows laid end to end: row i is `[starts[i]:starts[i + 1]]` of both arrays."""

    input_ids: np.ndarray  # int32
    labels: np.ndarray  # int32, IGNORED where not supervised; unshifted
    starts: np.ndarray  # int64, one more than there are rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        return np.diff(self.starts)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input_ids and labels of one row."""
        part = slice(self.starts[index], self.starts[index + 1])
        return self.input_ids[part], self.labels[part]


class Batch(NamedTuple):
    """One micro-batch: rows x length tokens, and the supervised positions in chunks of the head.

    The token at `targets[i, j]` is predicted from flattened position `positions[i, j]` (the one
    before it); `weights` is 1 where there is one and 0 in the filling of the last chunks.
    """

    input_ids: np.ndarray  # int32 (rows, length), padded at the right
    positions: np.ndarray  # int32 (chunks, chunk), into rows * length
    targets: np.ndarray  # int32 (chunks, chunk)
    weights: np.ndarray  # float32 (chunks, chunk)
    tokens: int  # real tokens
    supervised: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """What decides whether an engine sees a new shape: rows, length, chunks."""
        return (*self.input_ids.shape, len(self.positions))

    @property
    def padded(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids.size


class Plan(NamedTuple):
    """All rows of a training in their order, and how a micro-batch is made of some of them."""

    order: np.ndarray  # (steps, micro-batches, micro_batch) of row numbers
    batch: Callable[[Iterable[int]], Batch]


def head_chunk(context: int) -> int:
    """Supervised positions that the head scores at a time.

    256 at Qwen 2.5's vocabulary of 151,936 are 156 MB of float32 logits; at short contexts less,
    since a batch's positions are filled up to whole chunks.
    """
    return max(32, min(256, context // 4))


def read_examples(path: str | Path, context: int) -> Examples:
    """Read rows `{"input_ids", "labels"}` of a JSONL file.

    Raises ValueError naming file and line for a row that is empty, longer than `context`, without
    supervised token, with as many labels as it hasn't ids or with a label other than the token at
    its place; and naming the file when there is no row: none of these may reach an engine, where
    they end as NaN or as silently lost tokens.
    """
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                tokens = np.asarray(row["input_ids"], dtype=np.int32)
                targets = np.asarray(row["labels"], dtype=np.int32)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a row of input_ids and labels ({error!r}); delete "
                    "the file and run the workflow again"
                ) from None
            if problem := _problem(tokens, targets, context):
                raise ValueError(f"{path}, line {number}: {problem}")
            ids.append(tokens)
            labels.append(targets)
    if not ids:
        raise ValueError(
            f"{path}: no rows, expected at least one with supervised tokens; see stats.json beside "
            "it for what was dropped, and give more sessions or a longer context"
        )
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    return Examples(np.concatenate(ids), np.concatenate(labels), starts)


def _problem(tokens: np.ndarray, labels: np.ndarray, context: int) -> str | None:
    if tokens.ndim != 1 or tokens.shape != labels.shape or not len(tokens):
        return f"{tokens.shape} ids and {labels.shape} labels, expected as many, at least one"
    if len(tokens) > context:
        return f"{len(tokens)} tokens are more than the context of {context}"
    supervised = labels != IGNORED
    if not supervised[1:].any():
        return "no supervised token, expected at least one: its loss would be 0/0"
    if supervised[0]:
        return "the first token has a label, but nothing precedes it to predict it from"
    if (labels[supervised] != tokens[supervised]).any():
        return f"a label is neither {IGNORED} nor the token at its place"
    return None


def padded_lengths(context: int) -> tuple[int, ...]:
    """Return the fixed lengths that rows are padded to: quarters of the context, from 64 on."""
    step = max(-(-context // LENGTHS), min(64, context))
    return tuple(sorted({min(step * n, context) for n in range(1, LENGTHS + 1)}))


def padded_length(tokens: int, context: int) -> int:
    """Return the smallest of `padded_lengths` that holds `tokens`."""
    return next(length for length in padded_lengths(context) if length >= tokens)


def chunk_count(supervised: int, chunk: int) -> int:
    """Return how many head chunks are laid out for so many tokens: 1, 2, 3, 4, 6, 8, 12, 16, …

    At most a third is filling, and the number of shapes stays logarithmic.
    """
    needed = max(-(-supervised // chunk), 1)
    size = 1
    while True:
        for count in (size, size + size // 2):
            if count >= needed:
                return count
        size *= 2


def make_batch(
    examples: Examples, rows: Sequence[int], context: int, chunk: int, pad: int = 0
) -> Batch:
    """Lay out some rows as one batch; `pad` fills the right, where causal attention never looks."""
    parts = [examples.row(int(row)) for row in rows]
    length = padded_length(max(len(ids) for ids, _ in parts), context)
    input_ids = np.full((len(parts), length), pad, dtype=np.int32)
    positions, targets = [], []
    for number, (ids, labels) in enumerate(parts):
        input_ids[number, : len(ids)] = ids
        at = np.flatnonzero(labels != IGNORED)
        positions.append(number * length + at - 1)
        targets.append(labels[at])
    supervised = sum(len(part) for part in targets)
    chunks = chunk_count(supervised, chunk)
    laid_out = [np.zeros(chunks * chunk, dtype=kind) for kind in (np.int32, np.int32, np.float32)]
    laid_out[0][:supervised] = np.concatenate(positions)
    laid_out[1][:supervised] = np.concatenate(targets)
    laid_out[2][:supervised] = 1.0
    tokens = sum(len(ids) for ids, _ in parts)
    return Batch(input_ids, *(part.reshape(chunks, chunk) for part in laid_out), tokens, supervised)


def row_order(
    lengths: np.ndarray, steps: int, effective_batch: int, micro_batch: int, seed: int
) -> np.ndarray:
    """Return the rows of a whole training, int64 (steps, micro-batches, micro_batch).

    Every row comes once per epoch, each epoch reshuffled from `seed`; a step may straddle two
    epochs, so that all steps have the same number of rows. Within a step rows are ordered by
    length, which changes no gradient of the step and leaves less padding in its micro-batches.
    """
    accumulation = recipe.accumulation(effective_batch, micro_batch)
    wanted = steps * effective_batch
    epochs = -(-wanted // len(lengths))
    order = np.concatenate(
        [np.random.default_rng([seed, epoch]).permutation(len(lengths)) for epoch in range(epochs)]
    )[:wanted].reshape(steps, effective_batch)
    within = np.argsort(lengths[order], axis=1, kind="stable")
    return np.take_along_axis(order, within, axis=1).reshape(steps, accumulation, micro_batch)


def evaluation_batches(
    examples: Examples, context: int, chunk: int, micro_batch: int, pad: int = 0
) -> Iterator[Batch]:
    """Yield every row exactly once, in batches of rows of the same padded length."""
    groups: dict[int, list[int]] = {}
    for row, tokens in enumerate(examples.lengths.tolist()):
        groups.setdefault(padded_length(tokens, context), []).append(row)
    for _, rows in sorted(groups.items()):
        for start in range(0, len(rows), micro_batch):
            yield make_batch(examples, rows[start : start + micro_batch], context, chunk, pad)
