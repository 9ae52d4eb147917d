import json

import numpy as np
import pytest

from workflow_scripts.lib import batches
from workflow_scripts.lib.batches import IGNORED


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(length, supervised, start=10):
    ids = list(range(start, start + length))
    return {
        "input_ids": ids,
        "labels": [token if at in supervised else IGNORED for at, token in enumerate(ids)],
        "session": "s",
        "first_turn": 0,
        "last_turn": 1,
    }


def test_rows_come_back_as_written(tmp_path):
    rows = [row(5, {2, 4}), row(3, {1}), row(256, set(range(9, 200)))]
    examples = batches.read_examples(write(tmp_path / "train.jsonl", rows), 256)
    assert len(examples) == 3
    for index, wanted in enumerate(rows):
        ids, labels = examples.row(index)
        assert ids.tolist() == wanted["input_ids"]
        assert labels.tolist() == wanted["labels"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(4, set()), "line 2: no supervised token"),
        (row(9, {1}), "line 2: 9 tokens are more than the context of 8"),
        (row(4, {0, 1}), "line 2: the first token has a label"),
        ({"input_ids": [1, 2], "labels": [IGNORED]}, r"line 2: \(2,\) ids and \(1,\) labels"),
        ({"input_ids": [], "labels": []}, "line 2: .* at least one"),
        ({"input_ids": [1, 2], "labels": [IGNORED, 3]}, "line 2: a label is neither"),
        ({"labels": [IGNORED]}, "line 2: not a row"),
        ({"input_ids": ["a"], "labels": [1]}, "line 2: not a row"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "train.jsonl", [row(4, {1}), bad])
    with pytest.raises(ValueError, match=rf"train\.jsonl, {message}"):
        batches.read_examples(path, 8)


def test_empty_file_and_broken_line(tmp_path):
    with pytest.raises(ValueError, match=r"val\.jsonl: no rows"):
        batches.read_examples(write(tmp_path / "val.jsonl", []), 8)
    (tmp_path / "cut.jsonl").write_text('{"input_ids": [1')
    with pytest.raises(ValueError, match=r"cut\.jsonl, line 1: not a row"):
        batches.read_examples(tmp_path / "cut.jsonl", 8)


@pytest.mark.parametrize("context", [8, 100, 256, 512, 4096])
def test_few_padded_lengths_that_hold_every_row(context):
    lengths = batches.padded_lengths(context)
    assert 1 <= len(lengths) <= 4
    assert lengths[-1] == context
    for tokens in range(1, context + 1):
        length = batches.padded_length(tokens, context)
        assert tokens <= length < tokens + max(context // 4 + 1, 64)


def test_chunk_counts_waste_at_most_a_third_and_are_few():
    counts = [batches.chunk_count(tokens, 256) for tokens in range(1, 4097)]
    assert sorted(set(counts)) == [1, 2, 3, 4, 6, 8, 12, 16]
    for tokens, count in enumerate(counts, start=1):
        needed = -(-tokens // 256)
        assert needed <= count <= needed * 3 / 2


def test_positions_predict_exactly_the_supervised_tokens(tmp_path):
    rows = [row(5, {2, 4}), row(70, {1, 30, 69}), row(9, {8}, start=100)]
    examples = batches.read_examples(write(tmp_path / "t.jsonl", rows), 256)
    batch = batches.make_batch(examples, [1, 0, 2], 256, chunk=4, pad=7)
    assert batch.input_ids.shape == (3, 128)
    assert batch.input_ids[1, 5:].tolist() == [7] * 123
    assert (batch.tokens, batch.supervised, batch.padded) == (84, 6, 384)
    assert batch.positions.shape == (2, 4)
    real = batch.weights == 1
    assert real.sum() == 6
    flat = batch.input_ids.reshape(-1)
    after = batch.positions[real] + 1
    assert np.array_equal(flat[after], batch.targets[real])
    assert after.tolist() == [1, 30, 69, 128 + 2, 128 + 4, 256 + 8]


def test_order_has_every_row_once_per_epoch_reshuffled_and_seeded():
    lengths = np.arange(10, 20)
    order = batches.row_order(lengths, steps=5, effective_batch=4, micro_batch=2, seed=3)
    assert order.shape == (5, 2, 2)
    flat = order.reshape(-1)
    assert sorted(np.bincount(flat)) == [2] * 10
    again = batches.row_order(lengths, 5, 4, 2, seed=3)
    assert np.array_equal(order, again)
    assert not np.array_equal(order, batches.row_order(lengths, 5, 4, 2, seed=4))
    first, second = flat[:8], flat[12:]
    assert set(first) != set(second)
    assert len(set(first.tolist())) == 8  # no row twice before the epoch is over


def test_splits_into_micro_batches_hold_the_same_rows_per_step():
    lengths = np.random.default_rng(0).integers(5, 200, 30)
    orders = [batches.row_order(lengths, 7, 4, size, seed=0) for size in (1, 2, 4)]
    for order in orders[1:]:
        assert np.array_equal(order.reshape(7, 4), orders[0].reshape(7, 4))


def test_evaluation_takes_every_row_once_whatever_the_batch(tmp_path):
    rows = [row(length, {1, length - 1}) for length in (3, 250, 90, 64, 128, 129, 5, 7)]
    examples = batches.read_examples(write(tmp_path / "v.jsonl", rows), 256)
    for size in (1, 3, 8):
        made = list(batches.evaluation_batches(examples, 256, 8, size))
        assert sum(len(batch.input_ids) for batch in made) == len(rows)
        assert sum(batch.supervised for batch in made) == 16
        assert sum(batch.tokens for batch in made) == sum(len(r["input_ids"]) for r in rows)
