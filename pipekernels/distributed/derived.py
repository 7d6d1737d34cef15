"""Reductions of ``torch.distributed`` that a communicator does not have.

Most are calls of the extension. The others are announced first, so that ranks that make different
calls find out. Then every rank gathers the tensors of all and reduces them in rank order:
8-bit floats in float32, averages of integers in int64, cut off towards zero, as NCCL does.

Tensors are contiguous; tensors of reductions have one dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pipekernels.comm.collectives import Collectives
from pipekernels.comm.shared_memory import SharedMemoryBackend

_FOLDS: dict[str, Callable[[Any, Any], Tensor]] = {
    "sum": torch.add,
    "premul_sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def check(tensor: Tensor, op: str) -> None:
    """Raise TypeError if the dtype of ``tensor`` has no such operation."""
    dtype = tensor.dtype
    if (
        (op in ("max", "min") and dtype.is_complex)
        or (op == "avg" and dtype in (torch.bool, torch.uint64))
        or (op in ("and", "or", "xor") and (dtype.is_floating_point or dtype.is_complex))
    ):
        raise TypeError(f"{dtype} has no reduction {op!r}; convert the tensor, or use another one")


def all_reduce(comm: Collectives, tensor: Tensor, op: str, factor: Any) -> None:
    """Reduce ``tensor`` over all ranks, in place.

    Args:
        comm: the ranks.
        tensor: any dtype that has the operation.
        op: a name in ``codes().reductions``, which :func:`check` has taken.
        factor: of the terms, if not None.
    """
    backend = _backend_of(comm)
    if factor is not None:
        tensor *= factor
    if backend.reduces(tensor.dtype, op):
        backend.all_reduce(tensor, op, "auto")
    else:
        backend.announce("all_reduce", tensor, op)
        tensor.copy_(_reduced(comm, tensor, op))


def reduce_scatter(comm: Collectives, output: Tensor, input: Tensor, op: str, factor: Any) -> None:
    """Reduce ``input``, ``[ranks * k]``, over all ranks, and store this rank's part in ``output``,
    ``[k]``. Otherwise as :func:`all_reduce`."""
    backend = _backend_of(comm)
    if factor is not None:
        input = input * factor
    elif output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        input = input.clone()  # A communicator's input and output must not overlap.
    if backend.reduces(input.dtype, op):
        backend.reduce_scatter(input, output, op)
    else:
        backend.announce("reduce_scatter", input, op)
        output.copy_(_reduced(comm, input, op).view(comm._world_size, -1)[comm._rank])


def reduce(comm: Collectives, tensor: Tensor, op: str, factor: Any, root: int) -> None:
    """:func:`all_reduce` on rank ``root``; the others keep their tensors."""
    backend = _backend_of(comm)
    result = tensor if comm._rank == root else tensor.clone()
    if factor is not None:
        result *= factor
    if backend.reduces(tensor.dtype, op):
        backend.reduce(result, op, root)
    else:
        backend.announce("reduce", tensor, op, root)
        all_reduce(comm, result, op, None)


def _backend_of(comm: Collectives) -> SharedMemoryBackend:
    return cast(SharedMemoryBackend, comm._cpu_backend)


def _reduced(comm: Collectives, tensor: Tensor, op: str) -> Tensor:
    """The reduction of ``tensor``, in its dtype."""
    dtype = tensor.dtype
    wide = dtype  # In which terms are combined.
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.int64
    elif dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    elif dtype == torch.complex32:
        wide = torch.complex64
    # Every rank combines all terms itself, in rank order: so all get the same bits.
    terms = comm.all_gather(tensor[None]).to(wide).unbind()
    total = functools.reduce(_FOLDS[op], terms)
    if op == "avg":
        rounding_mode = "trunc" if wide == torch.int64 else None
        total = total.div(comm._world_size, rounding_mode=rounding_mode)
    return total.to(dtype)
