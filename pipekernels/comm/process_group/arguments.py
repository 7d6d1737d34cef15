"""What calls of ``torch.distributed`` are given: lists, reductions.

They are read at the call, as the caller may use lists and options again before an asynchronous one
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}


def parts_of(given: Sequence[Any], is_one: bool) -> list[list[Any]]:
    """The parts of a call: a tensor, or a copy of a list, for each argument. Those that a rank does
    not give are empty lists.

    Args:
        given: the arguments: lists of what the parts have, or what the only part has.
        is_one: there is one part. So it is too if the first argument is a tensor.
    """
    is_one = is_one or isinstance(given[0], Tensor)
    parts = [given] if is_one else zip_longest(*given, fillvalue=())
    return [[each if isinstance(each, Tensor) else [*each] for each in part] for part in parts]


def tensors_in(arguments: Iterable[Tensor | list[Tensor]]) -> list[Tensor]:
    """Those among ``arguments`` and in lists there."""
    found: list[Tensor] = []
    for each in arguments:
        found += each if isinstance(each, list) else (each,)
    return found


def reduction_of(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op = opts.reduceOp
    name = _REDUCTIONS[op.op]
    return name, op.__getstate__()[1] if name == "premul_sum" else None


def check_parts(call: str, parts: Sequence[Tensor], count: int, own: Tensor | None = None) -> None:
    """Raise ValueError unless there are ``count`` tensors, each as large as ``own`` and like it."""
    if len(parts) != count:
        raise ValueError(
            f"{call} needs a list of {count} tensors, one for each rank of the group, "
            f"got {len(parts)}"
        )
    for part in parts:
        if own is not None and _summary(part) != _summary(own):
            raise ValueError(
                f"{call} needs a list of tensors of the size, dtype and device of that beside it, "
                f"{_summary(own)}, got {_summary(part)}"
            )


def _summary(tensor: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.numel(), tensor.dtype, tensor.device
