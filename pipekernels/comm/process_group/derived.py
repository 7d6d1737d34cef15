"""Reductions and exchanges of ``torch.distributed`` that a communicator does not have.

On one host most are calls of the extension. The others are announced first, so that ranks that make
different calls find out, and then made of a communicator's collectives:

=========================================  ======================================================
float8, complex products                   of a wider dtype, rounded again; products are of the
                                           tensors of all ranks, gathered, in rank order
averages of integers                       a sum of int64, divided and cut off towards zero, as NCCL
                                           does
over several hosts: small or unsigned      of a wider dtype, cut off again: integers wrap around
integers
``bool``                                   sum and maximum are "or", product and minimum "and"
complex numbers                            sums and averages of their real numbers
products, bitwise "and", "or", "xor"       the tensors of all ranks, gathered, in rank order
=========================================  ======================================================

Tensors are dense and of one dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels.comm.codes import MOVABLE, REDUCTIONS
from pipekernels.comm.collectives import Collectives
from pipekernels.comm.hosts.cpu import bytes_of
from pipekernels.comm.tensors import elements_of

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
        op: a name in :data:`pipekernels.comm.codes.REDUCTIONS`.

    Raises:
        TypeError: the dtype has no such operation.
    """
    backend = comm._cpu_backend
    if backend.reduces(tensor.dtype, op):
        backend.all_reduce(tensor, op, "auto")
    else:
        _announce(comm, "all_reduce", tensor, op)
        tensor.copy_(_reduced(comm, tensor, op))


def reduce_scatter(comm: Collectives, input: Tensor, op: str, output: Tensor) -> None:
    """Reduce ``input``, ``[ranks * k]``, over all ranks, and store this rank's part in ``output``,
    ``[k]``, which must not overlap it. Otherwise as :func:`all_reduce`."""
    backend = comm._cpu_backend
    if backend.reduces(input.dtype, op):
        backend.reduce_scatter(input, output, op)
    else:
        _announce(comm, "reduce_scatter", input, op)
        output.copy_(_reduced(comm, input, op).view(comm._world_size, -1)[comm._rank])


def reduce(comm: Collectives, tensor: Tensor, op: str, root: int) -> None:
    """:func:`all_reduce` on rank ``root``; the others keep their tensors."""
    backend = comm._cpu_backend
    result = tensor if comm._rank == root else tensor.clone()
    if backend.core is not None and backend.reduces(tensor.dtype, op):
        count, dtype = tensor.numel(), MOVABLE[tensor.dtype]
        backend.core.reduce(result.data_ptr(), count, dtype, REDUCTIONS[op], root)
    else:
        _announce(comm, "reduce", tensor, op, root)
        all_reduce(comm, result, op)


def gather(
    comm: Collectives, gloo: dist.ProcessGroup, input: Tensor, outputs: list[Tensor], root: int
) -> None:
    """Store the ``input`` of each rank in ``outputs`` of rank ``root``; the others have none.

    Over several hosts ``gloo`` does it, so that only the root holds the tensors of all ranks; their
    bytes, as it does not have all dtypes.
    """
    backend = comm._cpu_backend
    if backend.core is not None:
        addresses = [output.data_ptr() for output in outputs]
        backend.core.gather(input.data_ptr(), addresses, *elements_of(input), root)
    else:
        backend.announce("gather", input, root=root)
        gloo.gather(list(map(bytes_of, outputs)), bytes_of(input), root).wait()


def scatter(
    comm: Collectives, gloo: dist.ProcessGroup, output: Tensor, inputs: list[Tensor], root: int
) -> None:
    """Store a tensor of ``inputs`` of rank ``root`` in ``output`` of each; see :func:`gather`."""
    backend = comm._cpu_backend
    if backend.core is not None:
        addresses = [input.data_ptr() for input in inputs]
        backend.core.scatter(addresses, output.data_ptr(), *elements_of(output), root)
    else:
        backend.announce("scatter", output, root=root)
        gloo.scatter(bytes_of(output), list(map(bytes_of, inputs)), root).wait()


def _reduced(comm: Collectives, tensor: Tensor, op: str) -> Tensor:
    """The reduction of ``tensor``, in its dtype."""
    dtype = tensor.dtype
    if op == "premul_sum":
        op = "sum"
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
        wide = tensor.to(_WIDER.get(dtype, torch.float32), copy=True)  # Else float8.
        comm.all_reduce(wide, op)
    return wide.to(dtype)


def _announce(comm: Collectives, call: str, tensor: Tensor, op: str, root: int = 0) -> None:
    """Raise TypeError if the dtype has no such operation; else check that all ranks ask for it."""
    dtype = tensor.dtype
    if (
        (op in ("max", "min") and dtype.is_complex)
        or (op == "avg" and dtype in (torch.bool, torch.uint64))
        or (op in ("and", "or", "xor") and (dtype.is_floating_point or dtype.is_complex))
    ):
        raise TypeError(f"{dtype} has no reduction {op!r}; convert the tensor, or use another one")
    comm._cpu_backend.announce(call, tensor, op, root)
