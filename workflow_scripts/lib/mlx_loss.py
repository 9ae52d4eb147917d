"""The loss in MLX: supervised positions through the frozen output head, chunk by chunk."""

from collections.abc import Iterable

from workflow_scripts.lib.batches import Batch


def batch_loss(model, input_ids, positions, targets, weights, learns: bool = True):
    """Return a value to differentiate, the summed loss (float32), and how many top-1 were right.

    The arrays are those of `batches.Batch`. The value's gradient is the loss's: the head is frozen,
    so the gradient with respect to the hidden states is made while a chunk's logits are at hand;
    no array ever has more rows of the vocabulary's width than one chunk.
    """
    import mlx.core as mx

    head = model.model.embed_tokens.as_linear if tied(model) else model.lm_head
    hidden = model.model(input_ids)
    rows = hidden.reshape(-1, hidden.shape[-1])[positions]
    value = loss = correct = mx.array(0.0)
    for row, target, weight in zip(rows, targets, weights, strict=True):
        x = mx.stop_gradient(row)
        logits = head(x).astype(mx.float32)
        target = target[:, None]
        normalizer = mx.logsumexp(logits, axis=-1, keepdims=True)
        right = mx.take_along_axis(logits, target, axis=-1)
        loss = loss + ((normalizer - right)[:, 0] * weight).sum()
        top = mx.argmax(logits, axis=-1, keepdims=True)
        correct = correct + ((top == target)[:, 0] * weight).sum()
        if learns:
            slope = mx.exp(logits - normalizer) - (mx.arange(logits.shape[-1]) == target)
            slope = (slope * weight[:, None]).astype(x.dtype)
            gradient = mx.vjp(head, [x], [slope])[1][0].astype(mx.float32)
            # Otherwise the logits of all chunks live until the losses are asked for.
            gradient, loss, correct = mx.depends([gradient, loss, correct], [loss, correct])
            value = value + (row.astype(mx.float32) * mx.stop_gradient(gradient)).sum()
    return value, mx.stop_gradient(loss), mx.stop_gradient(correct)


def tied(model) -> bool:
    """Whether the output head is the input embedding."""
    return not hasattr(model, "lm_head")


def to_device(batch: Batch) -> tuple:
    """Return the arrays of a batch as `batch_loss` takes them."""
    import mlx.core as mx

    arrays = (batch.input_ids, batch.positions, batch.targets, batch.weights)
    return tuple(mx.array(array) for array in arrays)


def evaluate(model, rows: Iterable[Batch]) -> tuple[float, int]:
    """Return the summed loss of all supervised tokens of some batches, and how many were right."""
    import mlx.core as mx

    model.eval()
    sums = []
    for batch in rows:
        _, loss, correct = batch_loss(model, *to_device(batch), learns=False)
        mx.async_eval(loss, correct)
        sums.append((loss, correct))
    model.train()
    return sum(loss.item() for loss, _ in sums), int(sum(correct.item() for _, correct in sums))
