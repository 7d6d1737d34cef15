"""Layers and whole models sharded over the ranks of a communicator."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipekernels.tensor_parallel.attention import ParallelMultiheadAttention
from pipekernels.tensor_parallel.clip import clip_grad_norm_
from pipekernels.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pipekernels.tensor_parallel.embedding import VocabParallelEmbedding
from pipekernels.tensor_parallel.integers.quantize import quantize_weights
from pipekernels.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pipekernels.tensor_parallel.plan.parallelize import tensor_parallelize, tensor_unparallelize
from pipekernels.tensor_parallel.plan.table import ModelPlan, PlannedLayer, plan_for
from pipekernels.tensor_parallel.state import (
    checkpoint_state_dict,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
)

__all__ = [
    "ColumnParallelLinear",
    "ModelPlan",
    "ParallelMultiheadAttention",
    "PlannedLayer",
    "RowParallelLinear",
    "TrainerMixin",
    "VocabParallelEmbedding",
    "adapt_accelerator",
    "add_adapters",
    "checkpoint_state_dict",
    "clip_grad_norm_",
    "compile_decoding",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_pretrained",
    "plan_for",
    "quantize_weights",
    "tensor_parallelize",
    "tensor_unparallelize",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    """The names of ``__all__`` that live in ``pipekernels.huggingface``, above this room."""
    if name in __all__:
        return getattr(import_module("pipekernels.huggingface"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
