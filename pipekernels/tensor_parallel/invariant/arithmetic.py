"""Products, sums and norms that have the same bits on any number of ranks; see the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.device.autocast import as_autocast, exactly
from pipekernels.ops.dispatch import check_differentiated_once
from pipekernels.ops.weights.k_slices import (
    SlicedWeight,
    k_slice_gemm,
    product_by_rows,
    tree_product,
    tree_sum,
)
from pipekernels.tensor_parallel.data_parallel import as_full_tensor
from pipekernels.tensor_parallel.functional import Heads, row_product
from pipekernels.tensor_parallel.invariant.slabs import (
    SLABS,
    check_eager,
    check_slabs,
    slabs_of,
    sum_of_ranks,
)


class ShardGradient(NamedTuple):
    """The gradient of this rank's shard of a parameter."""

    parameter: Tensor
    dim: int = 0  # That is sharded.
    blocks: Sequence[int] = ()  # How many features of each fused layer this rank has.
    counts: bool = True  # Whether this rank is the first that holds the shard.


def check_invariant_row(
    size: int, comm: Communicator, reduce: str, *, bias: bool, heads: Heads | None
) -> None:
    """Raise ValueError unless a row-parallel layer of ``size`` input features can be invariant."""
    if reduce == "none":
        raise ValueError(
            "reduce='none' returns partial sums, which differ with the number of ranks; "
            "invariant=True needs 'all_reduce' or 'reduce_scatter'"
        )
    if reduce == "reduce_scatter" and bias:
        raise ValueError(
            "reduce='reduce_scatter' with a bias: the sum of its gradient over the rows of all "
            "ranks depends on their number; invariant=True needs bias=False, or 'all_reduce'"
        )
    check_slabs([size], comm.world_size, heads)


def invariant_row_linear(
    x: Tensor, weight: Tensor, comm: Communicator, *, scatter: bool = False
) -> Tensor:
    """:func:`pipekernels.tensor_parallel.functional.row_linear`, summed over slabs. RuntimeError
    under ``torch.compile``, or ``torch.func``'s transforms."""
    check_eager()
    return row_product(x, weight, comm, scatter, _sliced_row, _product_by_slabs)


def invariant_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, blocks: Sequence[int]
) -> Tensor:
    """:func:`pipekernels.tensor_parallel.functional.column_linear`, slab by slab; each fused layer
    has as many features here as ``blocks`` says. Errors as for :func:`invariant_row_linear`."""
    check_eager()
    x, weight, *biases = as_autocast([x, weight] if bias is None else [x, weight, bias])
    added = biases[0] if biases else None
    result: Tensor = _ColumnLinear.apply(x, weight, added, comm, blocks)
    return result


def sum_by_slabs(x: Tensor, comm: Communicator) -> Tensor:
    """The sum over this rank's part of the last dimension: a subtree of the sum of all ranks."""
    return tree_sum(x.unflatten(-1, (SLABS // comm.world_size, -1)).sum(-1).unbind(-1))


def slab_norms(shards: Sequence[ShardGradient], norm_type: float, comm: Communicator) -> Tensor:
    """Norms of this rank's gradients by slabs, ``[SLABS / world_size, parameters]``: all ranks'
    norms have the norm of the full gradients."""
    return torch.stack([_norms_of(shard, norm_type, comm) for shard in shards], 1)


def _norms_of(shard: ShardGradient, norm_type: float, comm: Communicator) -> Tensor:
    """By slabs. Of fused layers, a slab has a part of each: the norm of the norms of its parts."""
    grad = shard.parameter.grad
    full = torch.zeros_like(shard.parameter) if grad is None else as_full_tensor(grad)
    rows = full.movedim(shard.dim, 0)

    def norm(tensor: Tensor) -> Tensor:
        result: Tensor = torch.linalg.vector_norm(tensor, norm_type)
        return result

    of_slabs = zip(*slabs_of(shard.blocks, comm.world_size), strict=True)
    of_blocks = ([norm(rows[part].contiguous()) for part in slab] for slab in of_slabs)
    return torch.stack([norm(torch.stack(norms)) for norms in of_blocks])


def _sliced_row(x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
    # Of any strides, the library might choose its kernel by them.
    partial = SlicedWeight(weight).partial_product(x.contiguous(), SLABS // comm.world_size)
    return sum_of_ranks(partial, comm, scatter=scatter).to(x.dtype)


def _product_by_slabs(a: Tensor, b: Tensor, comm: Communicator) -> Tensor:
    # The sharded features are rows of ``b``: each slab of them is a product by itself.
    [slabs] = slabs_of([len(b)], comm.world_size)
    with exactly(a):
        return product_by_rows(a, b, slabs)


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
        parts = (part for block in slabs_of(blocks, comm.world_size) for part in block)
        return SlicedWeight(weight).product(x.contiguous(), parts, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once("an invariant layer")
        x, weight = ctx.saved_tensors
        rows, flat = grad.reshape(-1, weight.shape[0]), x.reshape(-1, x.shape[-1])
        # The gradient of x is a sum over the sharded features, slab by slab over all fused layers.
        # Copies, as a kernel might choose its way by the distance between rows.
        pieces = [
            [(part, rows[:, part].contiguous()) for part in block]
            for block in slabs_of(ctx.blocks, ctx.comm.world_size)
        ]
        grad_x = grad_weight = grad_bias = None
        with exactly(x):
            if ctx.needs_input_grad[0]:
                of_slabs = zip(*pieces, strict=True)
                partial = tree_sum(_sum_of_blocks(slab, weight) for slab in of_slabs)
                grad_x = sum_of_ranks(partial, ctx.comm).to(x.dtype).view(x.shape)
            # Those of weight and bias have a row for each feature, and no sum over them.
            flattened = [piece for block in pieces for _, piece in block]
            if ctx.needs_input_grad[1]:
                grad_weight = k_slice_gemm(rows.t(), flat.t())
                if grad_weight is None:
                    grad_weight = torch.cat([piece.t() @ flat for piece in flattened])
            if ctx.needs_input_grad[2]:
                grad_bias = torch.cat([piece.sum(0) for piece in flattened])
        return grad_x, grad_weight, grad_bias, None, None


def _sum_of_blocks(slab: Sequence[tuple[slice, Tensor]], weight: Tensor) -> Tensor:
    """What one slab of all fused layers adds to the gradient of their input."""
    first, *others = (tree_product(piece, weight[part].t(), 1) for part, piece in slab)
    for other in others:
        first += other
    return first
