"""Layers and whole models sharded over the ranks of a communicator."""

from __future__ import annotations

from pipekernels.tensor_parallel.clip import clip_grad_norm_
from pipekernels.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    full_state_dict,
)
from pipekernels.tensor_parallel.plan import tensor_parallelize

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "clip_grad_norm_",
    "full_state_dict",
    "tensor_parallelize",
]
