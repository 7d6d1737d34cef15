"""Cross-entropy of logits whose classes, the vocabulary, are sharded over ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.ops.collectives import all_reduce
from pipekernels.tensor_parallel.functional import own_indices, reduce_from_ranks, shard_spans
from pipekernels.tensor_parallel.invariant.arithmetic import sum_by_slabs
from pipekernels.tensor_parallel.invariant.slabs import check_slabs


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    num_classes: int,
    comm: Communicator,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    invariant: bool = False,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of the output of a column-parallel head, not
    gathered: no rank holds the logits of all classes. After Shoeybi et al., "Megatron-LM" (2019).

    The ranks exchange three numbers per row in the forward and none in the backward. 16-bit logits
    are widened to float32, the dtype of the loss, as under autocast.

    Args:
        logits: ``[..., shard_sizes(num_classes, world_size)[rank]]``, a floating-point dtype.
        target: integers of shape ``[...]``, the same on every rank.
        num_classes: the number of classes of all ranks together.
        comm: the communicator.
        ignore_index: rows with this target have no loss and no gradient.
        reduction: ``'mean'`` (over rows that are not ignored; NaN if there are none), ``'sum'`` or
            ``'none'``.
        label_smoothing: in ``[0, 1]``: the weight of the uniform distribution in the target.
        invariant: the same bits on 1, 2, 4 and 8 ranks (:doc:`/guides/invariance`).

    Returns:
        A scalar, or ``[...]`` with ``'none'``; the same on every rank.

    Raises:
        ValueError: shapes do not fit, ``reduction`` is unknown, ``label_smoothing`` is outside, or
            classes cannot be cut into slabs (``invariant``).
        IndexError: a target is neither a class nor ``ignore_index``; on CUDA an assertion fails on
            the device.
    """
    start, own = shard_spans(num_classes, comm.world_size)[comm.rank]
    if logits.shape != (*target.shape, own):
        raise ValueError(
            f"rank {comm.rank} of {comm.world_size} holds {own} of {num_classes} classes, so for a "
            f"target of shape {tuple(target.shape)} logits must have shape "
            f"{(*target.shape, own)}, got {tuple(logits.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if invariant:
        check_slabs([num_classes], comm.world_size)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    ignored = target == ignore_index
    index, others = own_indices(target, (start, own), num_classes)
    index = index.masked_fill(ignored, 0)
    is_checked = not (index.is_cuda or torch.compiler.is_compiling())
    if is_checked and ((index < 0) | (index >= own)).any():
        raise IndexError(
            f"targets must be classes, 0 to {num_classes - 1}, or ignore_index={ignore_index}; got "
            f"some from {target.min().item()} to {target.max().item()}"
        )
    largest = all_reduce(logits.detach().amax(-1), comm, "max")
    shifted = logits - largest.unsqueeze(-1)  # No exponential overflows.
    chosen = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    summands = [shifted.exp(), shifted] if label_smoothing else [shifted.exp()]
    sums = [sum_by_slabs(x, comm) if invariant else x.sum(-1) for x in summands]
    # One all-reduce for all sums, whose backward needs none.
    parts = torch.stack([chosen.masked_fill(others, 0), *sums])
    logit, total, *smoothed = reduce_from_ranks(parts, comm, "tree" if invariant else "rank")
    log_total = total.log()
    loss: Tensor = log_total - logit
    if label_smoothing:
        uniform = log_total - smoothed[0] / num_classes
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    return loss.sum() / (~ignored).sum() if reduction == "mean" else loss.sum()
