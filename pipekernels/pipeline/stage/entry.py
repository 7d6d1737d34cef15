"""The autograd node at the beginning of a stage's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from pipekernels._torch_private import function_of


class Entry(torch.autograd.Function):
    """Identity; its output may be modified in place, which autograd forbids for leaves and their
    views."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def is_custom(node: Node) -> bool:
    """Whether ``node`` belongs to a custom function other than :class:`Entry`."""
    return function_of(node) not in (None, Entry)
