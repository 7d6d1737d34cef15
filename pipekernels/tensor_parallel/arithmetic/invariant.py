"""The steps of invariant layers: products by slabs, and sums in the order of one tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.local_ops.once import check_differentiated_once
from pipekernels.local_ops.skinny_gemm import skinny_linear, skinny_partial
from pipekernels.local_ops.slab_gemm import slab_gemm
from pipekernels.tensor_parallel.arithmetic.products import (
    product_by_rows,
    tree_product,
    tree_sum,
)

SLABS = 8
ALIGNED = (
    8  # Elements of 16 bytes or more: the library has other kernels for rows that are less aligned.
)
WIDTH = 32  # Elements of two of the widest vectors.
_LAYERS = "an invariant layer"  # For errors.


def check_slabs(sizes: Sequence[int], world_size: int) -> None:
    """Raise ValueError unless each of ``sizes`` features can be cut into slabs, and these dealt out
    to the ranks."""
    if SLABS % world_size:
        raise ValueError(
            f"invariant=True has {SLABS} slabs, which {world_size} ranks cannot share evenly; use "
            "1, 2, 4 or 8 ranks"
        )
    for size in sizes:
        if not has_slabs(size):
            raise ValueError(
                f"invariant=True cuts the sharded features into {SLABS} slabs of a multiple of "
                f"{ALIGNED}, but there are {size}; use a multiple of {SLABS * ALIGNED}, or leave "
                "this layer whole"
            )


def has_slabs(size: int) -> bool:
    """Whether ``size`` features can be cut into slabs."""
    return size % (SLABS * ALIGNED) == 0


def check_width(sizes: Sequence[int]) -> None:
    """Raise ValueError unless slabs of ``sizes`` features are whole vectors: torch's elementwise
    functions compute the last elements of a tensor, and of a thread's part of it, by other code,
    with other bits."""
    for size in sizes:
        if size % (SLABS * WIDTH):
            raise ValueError(
                f"invariant=True needs slabs of a multiple of {WIDTH} features before a function "
                f"such as an activation, but {size} features have {SLABS} slabs of "
                f"{size / SLABS:g}; use a multiple of {SLABS * WIDTH} features, or leave this "
                "layer whole"
            )


def invariant_row_linear(
    x: Tensor, weight: Tensor, comm: Communicator, *, scatter: bool = False
) -> Tensor:
    """``x @ weight.T``, summed over the ranks, each of which holds a part of the inner dimension.

    Args:
        x: ``[..., k_rank]``.
        weight: ``[out_features, k_rank]``.
        comm: the communicator.
        scatter: return only this rank's slice of the first dimension.

    Returns:
        ``[..., out_features]``; with ``scatter`` its slice ``[rows / world_size, ...]``.

    Raises:
        RuntimeError: under ``torch.compile``, or ``torch.func``'s transforms.
    """
    check_eager()
    x, weight = _as_autocast([x, weight])
    result: Tensor = _RowLinear.apply(x, weight, comm, scatter)
    return result


def invariant_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, blocks: Sequence[int]
) -> Tensor:
    """``x @ weight.T + bias`` of this rank's output features.

    Args:
        x: ``[..., in_features]``, the same on every rank.
        weight: ``[n_rank, in_features]``.
        bias: ``[n_rank]``.
        comm: the communicator.
        blocks: of how many of the features each of the fused layers consists.

    Returns:
        ``[..., n_rank]``.

    Raises:
        RuntimeError: under ``torch.compile``, or ``torch.func``'s transforms.
    """
    check_eager()
    x, weight, *biases = _as_autocast([x, weight] if bias is None else [x, weight, bias])
    result: Tensor = _ColumnLinear.apply(x, weight, biases[0] if biases else None, comm, blocks)
    return result


def invariant_add_to_slices(y: Tensor, bias: Tensor, comm: Communicator) -> Tensor:
    """``y + bias``, where each rank has a slice of the rows.

    Args:
        y: ``[rows / world_size, ..., out_features]``.
        bias: ``[out_features]``, the same on every rank, which all get the full gradient of.
        comm: the communicator.

    Raises:
        ValueError: the rows cannot be cut into slabs, by which the gradient is summed.
    """
    rows = y.shape[0] * comm.world_size
    if rows % SLABS:
        raise ValueError(
            "invariant=True with reduce='reduce_scatter' and a bias cuts the rows into "
            f"{SLABS} slabs, but there are {rows}; use a multiple of {SLABS}, or bias=False"
        )
    result: Tensor = _AddToSlices.apply(y, bias, comm)
    return result


def sum_of_slabs(x: Tensor, comm: Communicator) -> Tensor:
    """The sum over the last dimension, sharded over the ranks: this rank's subtree."""
    return tree_sum(x.unflatten(-1, (SLABS // comm.world_size, -1)).sum(-1).unbind(-1))


def slab_norms(
    grad: Tensor, dim: int, blocks: Sequence[int], comm: Communicator, norm_type: float
) -> Tensor:
    """The norms of this rank's slabs of a shard's gradient.

    Args:
        grad: sharded along ``dim``.
        blocks: of how many of its features each of the fused layers consists.
        comm: the communicator.
        norm_type: ``p`` of the p-norm.

    Returns:
        ``[SLABS / world_size]``.
    """
    rows = grad.movedim(dim, 0)

    def norm(part: slice) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(rows[part].contiguous(), norm_type)
        return found

    of_slabs = zip(*_parts(blocks, comm), strict=True)
    return torch.stack(
        [torch.linalg.vector_norm(torch.stack([norm(p) for p in s]), norm_type) for s in of_slabs]
    )


def check_eager() -> None:
    """Raise RuntimeError under ``torch.compile``."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile chooses kernels by their shapes, so the bits of a compiled model depend "
            "on the number of ranks; run layers with invariant=True uncompiled"
        )


def _as_autocast(tensors: list[Tensor]) -> list[Tensor]:
    """In the dtype that autocast, if on, has for linear layers."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    casts = [t.is_floating_point() and t.dtype != torch.float64 for t in tensors]
    return [t.to(dtype) if cast else t for t, cast in zip(tensors, casts, strict=True)]


def _exactly(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which products have the dtypes of their operands."""
    device = tensor.device.type
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def _slabs(size: int, comm: Communicator) -> Iterator[slice]:
    """This rank's slabs of ``size`` features that it holds."""
    width = size * comm.world_size // SLABS
    return (slice(start, start + width) for start in range(0, size, width))


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
        ctx.comm, ctx.scatter = comm, scatter
        ctx.save_for_backward(x, weight)
        shape = (*x.shape[:-1], weight.shape[0])
        x = x.contiguous()
        partial = skinny_partial(x, weight, SLABS // comm.world_size)
        if partial is None:
            rows = x.view(-1, x.shape[-1])
            with _exactly(x):
                partial = tree_product(rows, weight, SLABS // comm.world_size)
        # Not a view, which callers could not modify.
        return _reduce(partial.resize_(shape), comm, scatter).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once(_LAYERS)
        x, weight = ctx.saved_tensors
        if ctx.scatter:
            grad = ctx.comm.all_gather(grad)
        rows = grad.reshape(-1, weight.shape[0])  # [rows, out_features]
        flat = x.reshape(-1, x.shape[-1])
        slabs = list(_slabs(x.shape[-1], ctx.comm))
        grad_x = grad_weight = None
        with _exactly(x):
            if ctx.needs_input_grad[0]:
                grad_x = product_by_rows(rows, weight.t(), slabs).view(x.shape)
            if ctx.needs_input_grad[1]:
                grad_weight = product_by_rows(rows.t(), flat.t(), slabs)
        return grad_x, grad_weight, None, None


class _AddToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return (y + bias).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        check_differentiated_once(_LAYERS)
        slabs = grad.contiguous().chunk(SLABS // ctx.comm.world_size)
        wide = torch.promote_types(grad.dtype, torch.float32)
        partial = tree_sum(slab.flatten(0, -2).sum(0, dtype=wide) for slab in slabs)
        return grad, _reduce(partial, ctx.comm, False).to(grad.dtype), None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        comm: Communicator,
        blocks: Sequence[int],
    ) -> Tensor:
        ctx.comm, ctx.blocks = comm, blocks
        ctx.save_for_backward(x, weight)
        x = x.contiguous()
        few = skinny_linear(x, weight, bias)  # Each feature by itself.
        if few is not None:
            return few
        rows = x.view(-1, x.shape[-1])
        parts = (part for block in _parts(blocks, comm) for part in block)
        y = product_by_rows(rows, weight, parts, bias)
        return y.resize_(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once(_LAYERS)
        x, weight = ctx.saved_tensors
        rows, flat = grad.reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        # Copies, as a kernel might choose its way by the distance between rows.
        pieces = [
            [(part, rows[:, part].contiguous()) for part in block]
            for block in _parts(ctx.blocks, ctx.comm)
        ]
        grad_x = grad_weight = grad_bias = None
        with _exactly(x):
            if ctx.needs_input_grad[0]:
                of_slabs = zip(*pieces, strict=True)
                partial = tree_sum(_sum_of_blocks(slab, weight) for slab in of_slabs)
                grad_x = _reduce(partial, ctx.comm, False).to(x.dtype).view(x.shape)
            flattened = [piece for block in pieces for _, piece in block]
            if ctx.needs_input_grad[1]:
                grad_weight = slab_gemm(rows.t(), flat.t())
                if grad_weight is None:
                    grad_weight = torch.cat([piece.t() @ flat for piece in flattened])
            if ctx.needs_input_grad[2]:
                grad_bias = torch.cat([piece.sum(0) for piece in flattened])
        return grad_x, grad_weight, grad_bias, None, None


def _parts(blocks: Sequence[int], comm: Communicator) -> Iterator[list[slice]]:
    """For each fused layer, this rank's slabs of its features."""
    start = 0
    for size in blocks:
        yield [slice(start + slab.start, start + slab.stop) for slab in _slabs(size, comm)]
        start += size


def _sum_of_blocks(slab: Sequence[tuple[slice, Tensor]], weight: Tensor) -> Tensor:
    """What one slab of all fused layers adds to the gradient of their input."""
    first, *others = (tree_product(piece, weight[part].t(), 1) for part, piece in slab)
    for other in others:
        first += other
    return first


def _reduce(partial: Tensor, comm: Communicator, scatter: bool) -> Tensor:
    """The sum of the ranks' subtrees."""
    if comm.world_size == 1:
        return partial
    shared = comm.output(partial.shape, partial).copy_(partial)
    if scatter:
        return comm.reduce_scatter(shared, order="tree")
    return comm.all_reduce(shared, order="tree")
