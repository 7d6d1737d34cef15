"""The differentiable steps of tensor parallelism, over the ranks of a communicator.

Autograd convention: all ranks compute the same loss from a replicated result, so every rank already
has the full gradient of a replicated tensor, which must not be summed again:

=====================  =========================  ===========================  ==================
step                   forward                    shapes                       backward
=====================  =========================  ===========================  ==================
``copy_to_ranks``      identity                   ``[N, K] -> [N, K]``         all-reduce
``copy_to_holders``    identity                   ``[N, K] -> [N, K]``         sum over holders
``reduce_from_ranks``  all-reduce                 ``[N, M] -> [N, M]``         identity
``scatter_to_ranks``   own slice, last dimension  ``[N, K] -> [N, K / R]``     all-gather
``gather_from_ranks``  all-gather, last dim.      ``[N, M / R] -> [N, M]``     own slice
``row_linear``         GEMM, then all-reduce      ``[N, K / R], [M, K / R]     GEMMs only
                                                  -> [N, M]``
... with ``scatter``   GEMM, reduce-scatter       ``[N, K / R], [M, K / R]     all-gather, GEMMs
                                                  -> [N / R, M]``
=====================  =========================  ===========================  ==================

R ranks, N rows, K input and M output features; tensors may have more leading dimensions than N.
(:func:`pipekernels.ops.reduce_scatter`, with an all-gather as its backward, suits both
conventions.) After Shoeybi et al., "Megatron-LM" (2019), and Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022).

All ranks must call these functions in the same order, and an input must require a gradient on all
ranks or on none. They can be differentiated once: a backward with ``create_graph=True``,
forward-mode differentiation and the transforms of ``torch.func`` raise a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.comm.tensors import check_rows
from pipekernels.device.autocast import as_autocast
from pipekernels.ops.collectives import all_gather, all_reduce
from pipekernels.ops.dispatch import (
    can_skip_dispatcher,
    check_differentiated_once,
    has_derivatives,
)
from pipekernels.ops.weights import DenseWeight, Weight
from pipekernels.ops.weights.base import as_matrix

__all__ = [
    "copy_to_holders",
    "copy_to_ranks",
    "gather_from_ranks",
    "reduce_from_ranks",
    "row_linear",
    "scatter_to_ranks",
    "shard_sizes",
]

Heads: TypeAlias = tuple[int, int]
"""Of attention: how many heads a layer's features are of, and how many heads of keys there are."""


def shard_sizes(size: int, world_size: int) -> list[int]:
    """How many of ``size`` features each rank holds; if not equal, the first ranks hold one more.

    Raises:
        ValueError: a rank would hold no feature.
    """
    if not 1 <= world_size <= size:
        raise ValueError(
            f"cannot shard {size} features over {world_size} ranks: every rank needs at least one; "
            f"use a communicator of at most {size} ranks"
        )
    return [size // world_size + (rank < size % world_size) for rank in range(world_size)]


def shard_spans(size: int, world_size: int, heads: Heads | None = None) -> list[tuple[int, int]]:
    """Where the features of each rank lie among all ``size``: start and size, by rank.

    Without ``heads``, sizes are as from :func:`shard_sizes`. Else ranks hold whole groups: a key
    head and the query heads that read it; the first ranks hold one more. With fewer groups than
    ranks, several ranks hold one key head, and each a part of its query heads: on 3 ranks, 14 heads
    over 2 are 7, 4 and 3, and their keys, ``(2, 2)``, the first one and twice the second.

    Raises:
        ValueError: a rank would hold no feature; or so many heads do not have ``size`` features.
    """
    if heads is None:
        sizes = shard_sizes(size, world_size)
        return list(zip(accumulate(sizes, initial=0), sizes, strict=False))
    count, keys = heads
    if not 1 <= keys <= count or count % keys or size % count:
        raise ValueError(
            f"cannot cut {size} features between {count} heads over {keys} heads of keys; give the "
            "numbers of heads in all, each of which divides the number before"
        )
    group = count // keys  # Spans are of heads first; the last line scales them to features.
    if keys >= world_size:
        spans = [(start * group, held * group) for start, held in shard_spans(keys, world_size)]
    else:
        if group > 1:
            check_heads(heads, world_size)
        # The last keys have more ranks where these do not divide: the first ranks hold more heads.
        spans = []
        for key, ranks in enumerate(reversed(shard_sizes(world_size, keys))):
            parts = [(0, 1)] * ranks if group == 1 else shard_spans(group, ranks)
            spans += [(key * group + start, held) for start, held in parts]
    return [(start * size // count, held * size // count) for start, held in spans]


def shares(size: int, world_size: int, heads: Heads | None = None) -> list[int]:
    """The sizes of :func:`shard_spans`."""
    return [held for _, held in shard_spans(size, world_size, heads)]


def own_indices(x: Tensor, span: tuple[int, int], size: int) -> tuple[Tensor, Tensor]:
    """The indices ``x`` into ``size`` entries, as indices into this rank's ``span`` of them, 0 for
    other ranks' indices; and which are others'. An index that no rank has stays outside."""
    start, own = span
    others = ((x >= 0) & (x < start)) | ((x >= start + own) & (x < size))
    return (x - start).masked_fill(others, 0), others


def check_heads(heads: Heads | None, world_size: int) -> None:
    """Raise ValueError if there is not a head for each rank."""
    if heads is not None and heads[0] < world_size:
        raise ValueError(
            f"{world_size} ranks cannot share {heads[0]} attention heads: every rank needs at "
            "least one; use fewer ranks, or a plan that leaves this attention whole"
        )


def copy_to_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """A view of the replicated ``x``, from which each rank computes its part of the layer."""
    if can_skip_dispatcher([x]):
        return x.view_as(x)
    return _step(x, comm, "rank", _same, _sum)


def copy_to_holders(x: Tensor, comm: Communicator, shards: Sequence[int]) -> Tensor:
    """A view of the shard ``x``, which several ranks hold and use; ``shards`` are the numbers of
    the shards by rank."""
    if can_skip_dispatcher([x]):
        return x.view_as(x)
    return _step(x, comm, shards, _same, _sum_of_holders)


def reduce_from_ranks(x: Tensor, comm: Communicator, order: str = "rank") -> Tensor:
    """The sum over all ranks of the partial results ``x``; the loss that follows is replicated.

    Args and errors: as for :func:`pipekernels.ops.all_reduce`.
    """
    return _step(x, comm, order, _sum, _same)


def scatter_to_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """This rank's slice of the replicated ``x`` along the last dimension,
    ``[..., shard_sizes(x.shape[-1], world_size)[rank]]``, contiguous."""
    return _step(x, comm, shard_sizes(x.shape[-1], comm.world_size), _own_slice, _join_slices)


def gather_from_ranks(x: Tensor, comm: Communicator, size: int | Sequence[int]) -> Tensor:
    """Joins the slices of all ranks, ``[..., shard_sizes(size, world_size)[rank]]``, along the last
    dimension to ``[..., size]``, for a replicated loss. ``size`` may also be the sizes by rank."""
    sizes = shard_sizes(size, comm.world_size) if isinstance(size, int) else size
    return _step(x, comm, sizes, _join_slices, _own_slice)


def column_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, comm: Communicator | None
) -> Tensor:
    """``x @ weight.T + bias`` of the ``x`` replicated over ``comm``, or of this rank's own."""
    if has_derivatives((x, weight.tensor) if bias is None else (x, weight.tensor, bias)):
        x = x if comm is None else copy_to_ranks(x, comm)
        return functional.linear(x, weight.trained(), bias)
    return weight.linear(x, bias)


def row_linear(x: Tensor, weight: Tensor, comm: Communicator, *, scatter: bool = False) -> Tensor:
    """``x @ weight.T``, summed over the ranks, each of which holds a part of the inner dimension.

    The product of more than a few rows is written straight into a symmetric tensor, which the peers
    read in place. Under autocast it is computed in autocast's dtype, as
    ``torch.nn.functional.linear`` is.

    Args:
        x: ``[..., k_rank]``.
        weight: ``[out_features, k_rank]``.
        comm: the communicator.
        scatter: return only this rank's slice of the first dimension,
            ``[rows / world_size, ..., out_features]``.

    Raises:
        ValueError: ``scatter`` is set and the first dimension of ``x`` is not a multiple of the
            world size.
    """
    return summed_linear(x, DenseWeight(weight), comm, scatter)


def summed_linear(x: Tensor, weight: Weight, comm: Communicator, scatter: bool) -> Tensor:
    """:func:`row_linear` with a weight of any format."""
    if scatter:
        check_rows(x, comm.world_size, dims=2)
    if has_derivatives((x, weight.tensor)):
        return row_product(x, weight.trained(), comm, scatter, _dense_row, _dense_product)
    return weight.row_linear(x, comm, scatter)


# Of ``x``, the ranks, and what both directions of a step need: sizes, an order, or shards.
_Transform: TypeAlias = Callable[[Tensor, Communicator, Any], Tensor]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        option: Any,
        forward: _Transform,
        backward: _Transform,
    ) -> Tensor:
        ctx.comm, ctx.option, ctx.transform = comm, option, backward
        return forward(x, comm, option)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once("a layer that is sharded over ranks")
        return ctx.transform(grad, ctx.comm, ctx.option), None, None, None, None


_step: Callable[[Tensor, Communicator, Any, _Transform, _Transform], Tensor] = _Step.apply


def _same(x: Tensor, comm: Communicator, _: Any) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, comm: Communicator, order: str) -> Tensor:
    return all_reduce(x, comm, order=order)


def _sum_of_holders(grad: Tensor, comm: Communicator, shards: Sequence[int]) -> Tensor:
    """The sum of the gradients of the ranks that hold a shard, by an all-reduce of all shards."""
    all_shards = grad.new_zeros(max(shards) + 1, *grad.shape)
    own = shards[comm.rank]
    all_shards[own] = grad
    # A copy: the rest of the reduction's result can be freed.
    return all_reduce(all_shards, comm)[own].clone()


def row_product(
    x: Tensor,
    weight: Tensor,
    comm: Communicator,
    scatter: bool,
    forward: Callable[[Tensor, Tensor, Communicator, bool], Tensor],
    multiply: Callable[[Tensor, Tensor, Communicator], Tensor],
) -> Tensor:
    """:func:`row_linear` as a node of autograd: ``forward`` computes it, and ``multiply``
    ``a @ b.T`` for the gradients, where rows of ``b`` are sharded features."""
    operands = as_autocast((x, weight))
    result: Tensor = _RowLinear.apply(*operands, comm, scatter, forward, multiply)
    return result


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, scatter: bool, *rules: Any
    ) -> Tensor:
        forward, ctx.multiply = rules
        ctx.comm, ctx.scatter = comm, scatter
        ctx.save_for_backward(x, weight)
        result: Tensor = forward(x, weight, comm, scatter)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once("a layer that is sharded over ranks")
        x, weight = ctx.saved_tensors
        if ctx.scatter:
            grad = all_gather(grad, ctx.comm)
        rows = as_matrix(grad)  # [N, M]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.multiply(rows, weight.t(), ctx.comm).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.multiply(rows.t(), as_matrix(x).t(), ctx.comm)
        return grad_x, grad_weight, None, None, None, None


def _dense_row(x: Tensor, weight: Tensor, comm: Communicator, scatter: bool) -> Tensor:
    return DenseWeight(weight).row_linear(x, comm, scatter)


def _dense_product(a: Tensor, b: Tensor, comm: Communicator) -> Tensor:
    return functional.linear(a, b)


def _own_slice(x: Tensor, comm: Communicator, sizes: Sequence[int]) -> Tensor:
    start = sum(sizes[: comm.rank])
    # A copy: the result of a custom forward must not alias its input.
    return x[..., start : start + sizes[comm.rank]].clone(memory_format=torch.contiguous_format)


def _join_slices(x: Tensor, comm: Communicator, sizes: Sequence[int]) -> Tensor:
    if x.shape[-1] != sizes[comm.rank]:
        raise ValueError(
            f"rank {comm.rank} holds {sizes[comm.rank]} of {sum(sizes)} features over "
            f"{comm.world_size} ranks, but x has shape {tuple(x.shape)}"
        )
    # All-gather needs equal shapes: narrower slices are padded.
    if x.shape[-1] < max(sizes):
        x = functional.pad(x, (0, max(sizes) - x.shape[-1]))
    slices = all_gather(x.unsqueeze(0), comm)
    return torch.cat([slices[r, ..., :width] for r, width in enumerate(sizes)], dim=-1)
