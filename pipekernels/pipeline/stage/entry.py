"""The beginning of a stage's graph: the input, its autograd node, and the gradient there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from pipekernels._torch_private import function_of


class StageInput(torch.autograd.Function):
    """Identity; its output may be modified in place, which autograd forbids for leaves and their
    views."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


PAST_THE_OUTPUT = (
    "a backward reaches layers of a pipe past the pipe's output: a loss uses a value that a layer "
    "has left in an attribute, which is of one micro-batch; have the layers return it (a scalar "
    "comes back averaged over micro-batches), and use what the pipe returns"
)


class Leaf:
    """An input of a stage's graph, which shares the memory of ``tensor``, and the gradient that
    arrives there. ``foreign`` is called if it is of another backward than one of the stage.

    The gradient is taken on its way to ``tensor.grad``: there autograd would lay it out like the
    tensor, and with other strides earlier stages would take other kernels, with other bits, than in
    one graph of all stages.
    """

    def __init__(self, tensor: torch.Tensor, foreign: Callable[[], object]) -> None:
        self.tensor = tensor.detach().requires_grad_()
        # The tensor refers to this node weakly; its hook must not refer to the node or the leaf.
        self._accumulator = get_gradient_edge(self.tensor).node
        self._grads: list[torch.Tensor | None] = []  # Empty but during a backward of the stage.
        self._accumulator.register_prehook(partial(_keep, self._grads, foreign))

    def open(self) -> None:
        """Begin a backward of the stage."""
        self._grads[:] = (None,)

    def take(self) -> torch.Tensor | None:
        """End the backward; returns the gradient, None if there was none."""
        return self._grads.pop()


def _keep(place: list[Any], foreign: Callable[[], object], grads: tuple[Any, ...]) -> tuple[None]:
    if not place:
        foreign()
        raise RuntimeError(PAST_THE_OUTPUT)
    place[:] = grads
    return (None,)  # Nothing is left to accumulate.


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``tensor``, and as far from a multiple of 64 bytes: kernels and
    layers choose by both. Of a subclass or another layout, a clone."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    source = tensor.detach()
    extent, overlaps = 1, False
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        overlaps |= n > 1 and stride < extent
        extent += (n - 1) * stride
    offset = tensor.data_ptr() % 64 // tensor.element_size()
    memory = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), offset)
    if overlaps:  # As of an expanded tensor: torch copies to distinct elements only.
        memory[offset:].copy_(source.as_strided((extent,), (1,)))
    else:
        copy.copy_(source)
    return copy


def is_custom(node: Node) -> bool:
    """Whether ``node`` belongs to a custom function other than :class:`StageInput`."""
    return function_of(node) not in (None, StageInput)
