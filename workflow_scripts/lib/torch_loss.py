"""The loss in PyTorch: supervised positions through the frozen output head, chunk by chunk."""

from collections.abc import Iterable

from workflow_scripts.lib.batches import Batch


def batch_loss(model, input_ids, positions, targets, weights, chunks: int):
    """Return summed loss (differentiable, float32) and the number of right top-1 predictions.

    `model` is the PEFT model; the arrays are those of `batches.Batch` on its device, of which the
    first `chunks` chunks hold something. The head is frozen, so the gradient with respect to the
    hidden states is made while a chunk's logits are at hand: no array ever has more rows of the
    vocabulary's width than one chunk, and the backward pass needs no second product.
    """
    import torch
    from torch.nn import functional

    base = model.get_base_model()
    head = base.get_output_embeddings().weight
    hidden = base.model(input_ids=input_ids, use_cache=False).last_hidden_state
    rows = hidden.flatten(0, 1).index_select(0, positions.flatten())
    loss = torch.zeros((), device=rows.device)
    correct = torch.zeros((), device=rows.device)
    learns = rows.requires_grad
    gradient = torch.zeros_like(rows, dtype=torch.float32, requires_grad=False) if learns else None
    size = positions.shape[1]
    with torch.no_grad():
        for chunk in range(chunks):
            part = slice(chunk * size, (chunk + 1) * size)
            log_p = functional.linear(rows[part], head).float().log_softmax(-1)
            target, weight = targets[chunk].unsqueeze(1), weights[chunk].unsqueeze(1)
            loss -= (log_p.gather(1, target) * weight).sum()
            correct += ((log_p.argmax(1, keepdim=True) == target) * weight).sum()
            if learns:
                slope = log_p.exp_().scatter_add_(1, target, torch.full_like(weight, -1.0))
                gradient[part] = (slope.mul_(weight).to(head.dtype) @ head).float()
    if learns:
        surrogate = (rows.float() * gradient).sum()
        loss = loss + (surrogate - surrogate.detach())
    return loss, correct


def to_device(batch: Batch, device: str) -> tuple:
    """Return the arrays of a batch as `batch_loss` takes them."""
    import torch

    arrays = (batch.input_ids, batch.positions, batch.targets, batch.weights)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    ids, positions, targets, weights = tensors
    return ids.long(), positions.long(), targets.long(), weights, used_chunks(batch)


def used_chunks(batch: Batch) -> int:
    """Return how many of the batch's head chunks hold a supervised token."""
    return -(-batch.supervised // batch.positions.shape[1])


def evaluate(model, device: str, rows: Iterable[Batch]) -> tuple[float, int]:
    """Return the summed loss of all supervised tokens of some batches, and how many were right."""
    import torch

    was_training = model.training
    model.eval()
    losses, corrects = [], []
    with torch.no_grad():
        for batch in rows:
            loss, correct = batch_loss(model, *to_device(batch, device))
            losses.append(loss)
            corrects.append(correct)
    model.train(was_training)
    return sum(torch.stack(losses).tolist()), int(sum(torch.stack(corrects).tolist()))
