"""The beginning of a stage's graph: the input, its gradient there, and copies of what must keep its
values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipekernels.pipeline.microbatch import storage_id

PAST_THE_OUTPUT = (
    "a backward reaches layers of a pipe past the pipe's output: a loss uses a value that a layer "
    "has left in an attribute, which is of one microbatch; have the layers return it (a scalar "
    "comes back averaged over microbatches), and use what the pipe returns"
)


class StageInput(torch.autograd.Function):
    """The input of a stage, given a leaf that has its values. The backward leaves the gradient in
    ``grads[index]``; the list is empty but during a backward of the stage, and ``foreign`` is
    called before the error of any other backward.

    The output may be modified in place, which autograd forbids for leaves and their views. The
    leaf gets no gradient: autograd would lay it out like the leaf, and with other strides earlier
    stages would take other kernels, with other bits, than in one graph of all stages.
    """

    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor,
        grads: list[torch.Tensor | None],
        index: int,
        foreign: Callable[[], object],
    ) -> torch.Tensor:
        ctx.place = grads, index, foreign
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        grads, index, foreign = ctx.place
        if not grads:
            foreign()
            raise RuntimeError(PAST_THE_OUTPUT)
        grads[index] = grad
        return None, None, None, None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``tensor``, and as far from a multiple of 64 bytes: kernels and
    layers choose by both. Of a subclass or another layout, a clone."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    source = tensor.detach()
    # From the smallest stride: elements overlap if a stride is less than the extent so far.
    overlaps = False
    extent = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        overlaps = overlaps or (n > 1 and stride < extent)
        extent += (n - 1) * stride
    offset = tensor.data_ptr() % 64 // tensor.element_size()
    memory = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), offset)
    if overlaps:  # As of an expanded tensor: torch copies to distinct elements only.
        memory[offset:].copy_(source.as_strided((extent,), (1,)))
    else:
        copy.copy_(source)
    return copy


class Copied(torch.autograd.Function):
    """A :func:`copy_of` a tensor, in the tensor's graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return copy_of(tensor).detach()  # No view, which layers could not modify in place.

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def copied_apart(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``tensors``, with a :func:`copy_of` each that shares memory with ``others``."""
    taken = set(map(storage_id, others))
    return tuple([copy_of(each) if storage_id(each) in taken else each for each in tensors])
