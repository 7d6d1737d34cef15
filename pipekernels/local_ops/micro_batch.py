"""Split tensors into microbatches and concatenate microbatches, each in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels._arguments import check_kind, integer
from pipekernels.local_ops.dispatch import is_observed
from pipekernels.local_ops.micro_batch_op import CONCAT, SPLIT


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """Sizes of the microbatches of ``batch`` entries, as ``torch.tensor_split`` cuts them.

    There are ``max(1, min(chunks, batch))``; they differ by at most one, larger ones first.
    """
    count = max(1, min(chunks, batch))
    size, larger = batch // count, batch % count  # divmod() does not support symbolic sizes.
    return [size + 1] * larger + [size] * (count - larger)


@overload
def split_micro_batches(
    tensors: Tensor, chunks: int, dim: int = 0, *, dtype: torch.dtype | None = None
) -> list[Tensor]: ...


@overload
def split_micro_batches(
    tensors: Sequence[Tensor], chunks: int, dim: int = 0, *, dtype: torch.dtype | None = None
) -> list[tuple[Tensor, ...]]: ...


def split_micro_batches(
    tensors: Tensor | Sequence[Tensor],
    chunks: int,
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor] | list[tuple[Tensor, ...]]:
    """Copy ``tensors`` into contiguous microbatches along dimension ``dim``.

    Args:
        tensors: a tensor, or several of any shapes, strides and dtypes on one device that agree in
            their size along ``dim``.
        chunks: the number of microbatches; a smaller batch gives as many as it has entries.
            ``torch.export`` needs a batch of fixed size, as their number depends on it.
        dim: the batch dimension; may be negative.
        dtype: float64, float32, float16 or bfloat16, to which tensors of these four are cast in the
            same pass. Other tensors keep their dtype; gradients have the dtypes of the input.

    Returns:
        One entry per microbatch, a tensor if one was given, else a tuple of tensors. Sizes differ
        by at most one, larger ones first. No memory is shared with the input or among the results.

    Raises:
        TypeError: an argument is not a strided tensor.
        IndexError: ``dim`` is out of range.
        ValueError: ``chunks`` is not a positive integer; no tensor; sizes along ``dim`` or devices
            that differ; a cast between other dtypes, or of memory not aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    single = isinstance(tensors, Tensor)
    group = [tensors] if isinstance(tensors, Tensor) else _as_list(tensors, "tensors")
    quick = group and type(dim) is type(chunks) is int and dim >= 0 < chunks and not is_observed()
    if quick and _backend.load().are_plain(group) and dim < min([t.ndim for t in group]):
        run = SPLIT.directly
    else:
        run, dim, chunks = SPLIT, _check(group, dim), integer("chunks", chunks)
    flat = run(group, micro_batch_sizes(group[0].shape[dim], chunks), dim, dtype)
    if single:
        return flat
    return [tuple(flat[i : i + len(group)]) for i in range(0, len(flat), len(group))]


@overload
def concat_micro_batches(
    micro_batches: Sequence[Tensor], dim: int = 0, *, dtype: torch.dtype | None = None
) -> Tensor: ...


@overload
def concat_micro_batches(
    micro_batches: Sequence[Sequence[Tensor]], dim: int = 0, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]: ...


def concat_micro_batches(
    micro_batches: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Concatenate microbatches along dimension ``dim``: the inverse of
    :func:`split_micro_batches`.

    Args:
        micro_batches: one entry per microbatch, in order: a tensor, or a sequence of tensors that
            agree in their size along ``dim``. All entries have as many tensors, and the k-th has
            the same dtype, device and, except along ``dim``, shape in all of them. Any strides.
        dim: the batch dimension; may be negative.
        dtype: as in :func:`split_micro_batches`.

    Returns:
        A contiguous tensor, or a tuple of them if entries are sequences.

    Raises:
        TypeError, IndexError, RuntimeError: as :func:`split_micro_batches`.
        ValueError: no microbatch; shapes, dtypes, lengths or devices that differ; a cast between
            other dtypes, or of memory not aligned to its elements.
    """
    entries = list(micro_batches)
    if not entries:
        raise ValueError("there is no microbatch to concatenate; give at least one")
    single = isinstance(entries[0], Tensor)
    rows = [[e] if isinstance(e, Tensor) else _as_list(e, "a microbatch") for e in entries]
    width = len(rows[0])
    for i, row in enumerate(rows):
        if len(row) != width or isinstance(entries[i], Tensor) != single:
            raise ValueError(
                f"all microbatches must have the same structure: number 0 has {width} tensor(s), "
                f"number {i} has {len(row)}"
            )
    flat = [tensor for row in rows for tensor in row]
    # The quick native check accepts plain tensors only, and gives no reason when it fails.
    is_valid = isinstance(dim, int) and dim >= 0 and width > 0 and not is_observed()
    if is_valid and _backend.load().are_plain_and_fit(dim, width, flat):
        wholes = CONCAT.directly(flat, width, dim, dtype)
    else:
        wholes = CONCAT(flat, width, _check(flat, dim), dtype)
    return wholes[0] if single else tuple(wholes)


def _as_list(tensors: Any, what: str) -> list[Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what} must be tensors in a list or tuple, got {type(tensors).__name__}")
    return list(tensors)


def _check(tensors: list[Tensor], dim: int) -> int:
    """Check all that the native copy does not; returns ``dim`` as a non-negative number."""
    if not tensors:
        raise ValueError("there is no tensor; give at least one")
    check_kind("dim", dim, int, "an int")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__} at position {i}")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError(
                f"tensor {i} is not a dense one: it has layout {tensor.layout} and dtype "
                f"{tensor.dtype}{', nested' * tensor.is_nested}; use .to_dense(), "
                "torch.nested.to_padded_tensor() or .dequantize() first"
            )
        tensor.size(dim)  # IndexError if there is no such dimension.
        if tensor.device != first.device:
            raise ValueError(
                f"all tensors must be on one device: tensor 0 is on {first.device}, tensor {i} on "
                f"{tensor.device}"
            )
        if dim < 0 and tensor.dim() != first.dim():
            raise ValueError(
                f"dim={dim} is another dimension of tensor 0, of shape {tuple(first.shape)}, than "
                f"of tensor {i}, of shape {tuple(tensor.shape)}; use a non-negative dim"
            )
    return first.dim() + dim if dim < 0 else dim
