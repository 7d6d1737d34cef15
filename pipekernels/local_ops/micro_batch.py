"""Split tensors into micro-batches and concatenate micro-batches, each in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.local_ops.dispatch import is_observed
from pipekernels.local_ops.micro_batch_op import CONCAT, SPLIT

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FLOATING_NAMES = "float64, float32, float16 or bfloat16"


def micro_batch_sizes(batch: int, chunks: int) -> list[int]:
    """Sizes of the micro-batches of ``batch`` entries, as ``torch.tensor_split`` cuts them.

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
    """Copy ``tensors`` into contiguous micro-batches along dimension ``dim``.

    Args:
        tensors: a tensor, or several of any shapes and dtypes on one device that agree in their
            size along ``dim``. Any strides.
        chunks: the number of micro-batches; a smaller batch gives as many as it has entries.
            ``torch.export`` needs a batch of fixed size, as their number depends on it.
        dim: the batch dimension; may be negative.
        dtype: float64, float32, float16 or bfloat16: floating-point tensors are cast to it in the
            same pass, as by ``tensor.to(dtype)``. Other tensors, such as token ids and masks, keep
            their dtype. Gradients have the dtypes of the input.

    Returns:
        One entry per micro-batch, a tensor if one was given, else a tuple of tensors. Sizes differ
        by at most one, larger ones first. No memory is shared with the input or among the results.

    Raises:
        TypeError: an argument is not a strided tensor or not an integer; ``dtype``, or the dtype of
            a tensor to cast, is none of those four.
        ValueError: ``chunks`` below 1, ``dim`` out of range, sizes along ``dim`` or devices that
            differ, no tensor, a tensor without dimensions, or a tensor to cast whose memory is not
            aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    single = isinstance(tensors, Tensor)
    group = [tensors] if isinstance(tensors, Tensor) else _as_list(tensors, "tensors")
    dim = _check_dim(group, dim)
    if not isinstance(chunks, int):
        raise TypeError(f"chunks must be an int, got {type(chunks).__name__}")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    batch = group[0].shape[dim]
    for i, tensor in enumerate(group):
        if tensor.shape[dim] != batch:
            raise ValueError(
                f"all tensors must have the same size along dimension {dim}: tensor 0 has {batch}, "
                f"tensor {i} has {tensor.shape[dim]}"
            )
    _check_casts(group, dtype)
    flat = SPLIT(group, micro_batch_sizes(batch, chunks), dim, dtype)
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
    """Concatenate micro-batches along dimension ``dim``: the inverse of
    :func:`split_micro_batches`.

    Args:
        micro_batches: one entry per micro-batch, in order: a tensor, or a sequence of tensors that
            agree in their size along ``dim``. All entries have as many tensors, and the k-th has
            the same dtype, device and, except along ``dim``, shape in all of them. Any strides.
        dim: the batch dimension; may be negative.
        dtype: as in :func:`split_micro_batches`.

    Returns:
        A contiguous tensor, or a tuple of them if entries are sequences.

    Raises:
        TypeError: an argument is not a strided tensor, dtypes differ, or ``dtype`` or the dtype of
            a tensor to cast is not supported.
        ValueError: no micro-batch, ``dim`` out of range, shapes, lengths or devices that differ, or
            a tensor to cast whose memory is not aligned to its elements.
        RuntimeError: CUDA tensors with an extension built without CUDA.
    """
    entries = list(micro_batches)
    if not entries:
        raise ValueError("there is no micro-batch to concatenate; give at least one")
    single = isinstance(entries[0], Tensor)
    rows = [[e] if isinstance(e, Tensor) else _as_list(e, "a micro-batch") for e in entries]
    width = len(rows[0])
    for i, row in enumerate(rows):
        if len(row) != width or isinstance(entries[i], Tensor) != single:
            raise ValueError(
                f"all micro-batches must have the same structure: number 0 has {width} tensor(s), "
                f"number {i} has {len(row)}"
            )
    flat = [tensor for row in rows for tensor in row]
    # In all other cases are_plain_and_fit() below does these checks.
    if dtype is not None or width == 0 or not isinstance(dim, int) or dim < 0:
        dim = _check_dim(rows[0], dim)
        _check_casts(rows[0], dtype)
    # The quick native check accepts plain tensors only, and gives no reason when it fails.
    if not is_observed() and _backend.load().are_plain_and_fit(dim, width, flat):
        wholes = CONCAT.directly(flat, width, dim, dtype)
    else:
        dim = _check_dim(rows[0], dim)
        for i, row in enumerate(rows):
            _check_fits(rows[0], row, dim, i)
        wholes = CONCAT(flat, width, dim, dtype)
    return wholes[0] if single else tuple(wholes)


def _as_list(tensors: Any, what: str) -> list[Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{what} must be tensors in a list or tuple, got {type(tensors).__name__}")
    return list(tensors)


def _check_dim(group: list[Tensor], dim: int) -> int:
    """Validate the tensors of one micro-batch; returns ``dim`` as a non-negative number."""
    if not group:
        raise ValueError("there is no tensor; give at least one")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    first = group[0]
    for i, tensor in enumerate(group):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected tensors, got {type(tensor).__name__} at position {i}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"tensor {i} has layout {tensor.layout}; use .to_dense() first")
        if tensor.is_nested:
            raise TypeError(f"tensor {i} is nested; use torch.nested.to_padded_tensor() first")
        if tensor.is_quantized:
            raise TypeError(f"tensor {i} has dtype {tensor.dtype}; use .dequantize() first")
        dims = tensor.dim()
        if dims == 0:
            raise ValueError(f"tensor {i} has no dimension to split; use tensor[None]")
        if not -dims <= dim < dims:
            raise ValueError(
                f"dim must be in -{dims}..{dims - 1} for tensor {i} of shape "
                f"{tuple(tensor.shape)}, got {dim}"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"all tensors must be on one device: tensor 0 is on {first.device}, tensor {i} on "
                f"{tensor.device}"
            )
        if dim < 0 and dims != first.dim():
            raise ValueError(
                f"dim={dim} is dimension {first.dim() + dim} of tensor 0 and {dims + dim} of "
                f"tensor {i}; use a non-negative dim"
            )
    return first.dim() + dim if dim < 0 else dim


def _check_fits(first: list[Tensor], row: list[Tensor], dim: int, index: int) -> None:
    """Raise unless micro-batch ``index``, ``row``, can be concatenated with micro-batch 0."""
    for t, (wanted, given) in enumerate(zip(first, row, strict=True)):
        if not isinstance(given, Tensor):
            raise TypeError(f"expected tensors, got {type(given).__name__} in micro-batch {index}")
        if given.dtype is not wanted.dtype:
            raise TypeError(
                f"dtypes must agree: micro-batch 0 has {wanted.dtype}, number {index} {given.dtype}"
            )
        if given.device != wanted.device:
            raise ValueError(
                f"devices must agree: micro-batch 0 is on {wanted.device}, number {index} on "
                f"{given.device}"
            )
        shape, before = tuple(given.shape), tuple(wanted.shape)
        others, others_before = shape[:dim] + shape[dim + 1 :], before[:dim] + before[dim + 1 :]
        if others != others_before or len(shape) != len(before):
            raise ValueError(
                f"shapes must agree but in dimension {dim}: micro-batch 0 has {before}, number "
                f"{index} {shape}"
            )
        if t > 0 and shape[dim] != row[0].shape[dim]:
            raise ValueError(
                f"the tensors of a micro-batch must have the same size along dimension {dim}: in "
                f"number {index}, tensor 0 has {row[0].shape[dim]}, tensor {t} has {shape[dim]}"
            )


def _check_casts(group: list[Tensor], dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if dtype not in _FLOATING:
        raise TypeError(f"dtype must be {_FLOATING_NAMES}, got {dtype}")
    for i, tensor in enumerate(group):
        if tensor.is_floating_point() and tensor.dtype not in _FLOATING:
            raise TypeError(
                f"tensor {i} has dtype {tensor.dtype}, and only {_FLOATING_NAMES} are cast to "
                f"{dtype}; use .to({dtype}) first"
            )
