"""What calls of ``torch.distributed`` are given: lists, options, reductions.

Torch's C++ passes lists and options; its Python code and users also pass single tensors, and fields
of the options. They are read at the call, as the caller may use lists and options again before an
asynchronous one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_UNSCALED = {op: name for op, name in _REDUCTIONS.items() if op != dist.ReduceOp.PREMUL_SUM}


def listed(given: Sequence[Any]) -> tuple[list[Any], ...]:
    """Copies of the lists of a call; if one is a tensor, the others lack a level too."""
    is_alone = any(isinstance(each, Tensor) for each in given)
    wrapped = (
        [each] if isinstance(each, Tensor) or (is_alone and each) else each or [] for each in given
    )
    return tuple(
        [[*part] if isinstance(part, (list, tuple)) else part for part in each] for each in wrapped
    )


def renewed(kind: Any, opts: Any) -> Any:
    """Options with the timeout of ``opts``, which the caller may use again."""
    options = kind()
    options.timeout = opts.timeout
    return options


def options_of(
    kind: Any, opts: Any = None, timeout: Any = None, *, root: Any = None, op: Any = None
) -> Any:
    """The options of a call: ``opts``, or new ones if that is none, or a root or reduction."""
    if hasattr(opts, "timeout"):
        return opts
    options = kind()
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    for name, value in (("rootRank", root), ("reduceOp", op), ("timeout", timeout)):
        if value is not None:
            setattr(options, name, value)
    return options


def native_reduction(opts: Any) -> str:
    """The name of the reduction; empty if its terms have a factor."""
    return _UNSCALED.get(opts.reduceOp.op, "")


def reduction_of(opts: Any) -> tuple[str, Any]:
    """The name of the reduction, and the factor of its terms, None without one."""
    op, factor = opts.reduceOp.__getstate__()  # One call; comparing with all of them takes longer.
    return _REDUCTIONS[op], factor


def check_list(call: str, tensors: Sequence[Tensor], ranks: int) -> None:
    """Raise ValueError if there is not a tensor for each rank."""
    if len(tensors) != ranks:
        raise ValueError(
            f"{call} needs a list of {ranks} tensors, one for each rank of the group, "
            f"got {len(tensors)}"
        )


def check_parts(call: str, parts: Sequence[Tensor], own: Tensor, ranks: int) -> None:
    """Raise ValueError if there is not a tensor of the size and dtype of ``own`` for each rank."""
    check_list(call, parts, ranks)
    for part in parts:
        if part.numel() != own.numel() or part.dtype != own.dtype:
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
