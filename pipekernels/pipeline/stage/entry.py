"""Where a stage's graph begins."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from pipekernels._torch_private import function_of


class Entry(torch.autograd.Function):
    """Identity whose output a layer may modify in place, which autograd forbids on leaves and on
    views of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def is_custom(node: Node) -> bool:
    """Whether ``node`` belongs to a custom function that is not :class:`Entry`."""
    return function_of(node) not in (None, Entry)
