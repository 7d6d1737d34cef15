"""Reductions and exchanges made of a communicator's collectives, for ``torch.distributed``.

=========================================  ======================================================
sums, maxima, minima of small or unsigned  of a wider dtype, cut off again: integers wrap around
integers and of float8
averages of integers                       a sum, divided and cut off towards zero, as NCCL does
of ``bool``                                sum and maximum are "or", product and minimum "and"
of complex numbers                         sums and averages of their real numbers
products, bitwise "and", "or", "xor"       the tensors of all ranks, gathered, in rank order
``reduce``, ``gather``, ``scatter``        ``all_reduce``, ``all_gather``, ``broadcast``
=========================================  ======================================================

Tensors are dense and of one dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm.codes import OPERATIONS, REDUCIBLE
from pipekernels.comm.collectives import Collectives

_WIDER = {
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
_FOLDS: dict[str, Callable[[Any, Any], Tensor]] = {
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
_OF_BOOL = {"sum": "max", "product": "min"}


def all_reduce(comm: Collectives, tensor: Tensor, op: str) -> None:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        comm: the ranks.
        tensor: any dtype that has the operation.
        op: one of a communicator's, or ``'product'``, ``'and'``, ``'or'``, ``'xor'``.

    Raises:
        TypeError: the dtype has no such operation.
    """
    if _is_native(tensor.dtype, op):
        comm.all_reduce(tensor, op)
    else:
        tensor.copy_(_reduced(comm, tensor, op))


def reduce_scatter(comm: Collectives, rows: Tensor, op: str, out: Tensor | None = None) -> Tensor:
    """Row ``rank`` of the reduction of ``rows``, ``[ranks, k]``; in ``out``, ``[1, k]``, if it is
    given. Otherwise as :func:`all_reduce`."""
    if _is_native(rows.dtype, op):
        own = comm.reduce_scatter(rows.view(-1), op, out=None if out is None else out.view(-1))
        return own[None] if out is None else out
    own = _reduced(comm, rows.reshape(-1), op).view(rows.shape)[comm._rank :][:1]
    return own if out is None else out.copy_(own)


def reduce(comm: Collectives, tensor: Tensor, op: str, root: int) -> None:
    """:func:`all_reduce` on rank ``root``; the others keep their tensors."""
    all_reduce(comm, tensor if comm._rank == root else tensor.clone(), op)


def gather(comm: Collectives, input: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy the inputs of all ranks to ``outputs``, of any shapes, which only the root gives."""
    rows = comm.all_gather(input[None])
    for row, output in zip(rows, outputs, strict=False):
        output.copy_(row.view(output.shape))


def scatter(comm: Collectives, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """Copy ``inputs[rank]`` of the root, which alone gives any, to the ``output`` of each rank."""
    if inputs:
        rows = torch.stack([input.reshape(-1) for input in inputs])
    else:
        rows = output.new_empty(comm._world_size, output.numel())
    comm.broadcast(rows, root)
    output.copy_(rows[comm._rank].view(output.shape))


def _is_native(dtype: torch.dtype, op: str) -> bool:
    return dtype in REDUCIBLE and op in OPERATIONS and (op != "avg" or dtype.is_floating_point)


def _reduced(comm: Collectives, tensor: Tensor, op: str) -> Tensor:
    """The reduction of ``tensor``, in its dtype."""
    dtype = tensor.dtype
    _check(dtype, op)
    if dtype == torch.bool:
        op = _OF_BOOL.get(op, op)
    if dtype == torch.uint64:
        # As int64, whose sums and products have the same bits, in an order that is theirs.
        flip = -(2**63) if op in ("max", "min") else 0
        signed = tensor.view(torch.int64) ^ flip
        all_reduce(comm, signed, op)
        return (signed ^ flip).view(dtype)
    if op in _FOLDS:
        narrow = dtype.itemsize < 4 and dtype.is_floating_point
        wide = tensor.to(torch.float32 if narrow else _WIDER.get(dtype, dtype))
        return functools.reduce(_FOLDS[op], comm.all_gather(wide[None]).unbind()).to(dtype)
    if dtype.is_complex:
        wide = tensor.to(_WIDER.get(dtype, dtype), copy=True)
        comm.all_reduce(torch.view_as_real(wide), op)
    elif op == "avg" and not dtype.is_floating_point:
        wide = tensor.to(torch.int64, copy=True)
        comm.all_reduce(wide, "sum")
        wide.div_(comm._world_size, rounding_mode="trunc")
    else:
        wide = tensor.to(_WIDER.get(dtype, torch.float32))  # Else float8.
        comm.all_reduce(wide, op)
    return wide.to(dtype)


def _check(dtype: torch.dtype, op: str) -> None:
    """Raise TypeError if ``dtype`` has no such operation."""
    if (
        (op in ("max", "min") and dtype.is_complex)
        or (op == "avg" and dtype in (torch.bool, torch.uint64))
        or (op in ("and", "or", "xor") and (dtype.is_floating_point or dtype.is_complex))
    ):
        raise TypeError(f"{dtype} has no reduction {op!r}; convert the tensor, or use another one")
