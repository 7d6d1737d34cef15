"""What calls of ``torch.distributed`` are given: lists, options, reductions.

Torch's C++ passes lists and options; its Python code and users also pass single tensors, and fields
of the options. They are read at the call, as the caller may use lists and options again before an
asynchronous one runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

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
        is_one: there is one part. So it is too if an argument is a tensor.
    """
    if is_one or isinstance(given[0], Tensor) or isinstance(given[-1], Tensor):
        lists = [[each] for each in given]
    else:
        count = len(given[0] or given[-1])
        lists = [each or [()] * count for each in given]
    parts = []
    for part in zip(*lists, strict=True):
        parts.append([each if isinstance(each, Tensor) else [*(each or ())] for each in part])
    return parts


def tensors_in(parts: Iterable[list[Any]], arguments: slice) -> list[Tensor]:
    """Those among ``arguments`` and in lists there."""
    found: list[Tensor] = []
    for part in parts:
        for each in part[arguments]:
            found += each if isinstance(each, list) else (each,)
    return found


def options_of(*given: Any, **fields: Any) -> Any:
    """The options of a call: what it is given, or new ones with a root, reduction or timeout."""
    values = [*given, *fields.values()]
    if values and hasattr(values[0], "timeout"):
        return values[0]
    options: Any = dist.ReduceOptions()  # These have the fields of all others.
    for value in values:
        is_time = isinstance(value, datetime.timedelta)
        name = "rootRank" if isinstance(value, int) else "timeout" if is_time else "reduceOp"
        if value is not None:
            setattr(options, name, value)
    return options


def reduction_of(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op = opts.reduceOp
    name = _REDUCTIONS[op.op]
    return name, op.__getstate__()[1] if name == "premul_sum" else None


def check_parts(call: str, parts: Sequence[Tensor], ranks: int, own: Tensor | None = None) -> None:
    """Raise ValueError if there is not a tensor for each rank, of the size and dtype of ``own``."""
    if len(parts) != ranks:
        raise ValueError(
            f"{call} needs a list of {ranks} tensors, one for each rank of the group, "
            f"got {len(parts)}"
        )
    for part in parts:
        if own is not None and (part.numel() != own.numel() or part.dtype != own.dtype):
            raise ValueError(
                f"{call} needs tensors of one size and dtype, got {tuple(part.shape)} of "
                f"{part.dtype} in the list and {tuple(own.shape)} of {own.dtype} beside it"
            )


def check_sizes(call: str, part: Tensor, whole: Tensor, name: str, ranks: int) -> None:
    """Raise ValueError if ``whole`` does not have the elements of ``part`` for each rank."""
    if whole.numel() != ranks * part.numel():
        raise ValueError(
            f"{call} over {ranks} ranks needs an {name} of {ranks} x {part.numel()} elements, got "
            f"one of shape {tuple(whole.shape)} beside {tuple(part.shape)}"
        )
