"""Gives a recomputation the buffers that its forward had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipekernels.pipeline.stage.parameters import versions

Values = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""By id and version of a buffer: it, and a copy of that version."""


class Buffer(NamedTuple):
    """A buffer that requires no gradient: graphs must use the others themselves, not copies."""

    owner: dict[str, Any]
    """The ``_buffers`` of its layer."""
    name: str
    buffer: torch.Tensor
    value: torch.Tensor


def _buffers(layers: Sequence[nn.Module]) -> Iterator[Buffer]:
    for layer in layers:
        for name, buffer in layer._buffers.items():
            if buffer is not None and not buffer.requires_grad:
                yield Buffer(layer._buffers, name, buffer, buffer)


def buffers_now(layers: Sequence[nn.Module], values: Values) -> list[Buffer]:
    """The buffers of ``layers`` with their present values. Copies are added to ``values``, where
    microbatches share them."""
    found = []
    for each in _buffers(layers):
        key = id(each.buffer), versions([each.buffer])[0]
        if key not in values:
            values[key] = each.buffer, each.buffer.clone()
        found.append(each._replace(value=values[key][1]))
    return found


@contextmanager
def buffers_of_forward(layers: Sequence[nn.Module], found: Sequence[Buffer]) -> Iterator[None]:
    """Have ``layers`` use copies of their buffers in the body, with the values of ``found``, before
    the forward, which has already updated the buffers."""
    given = {(id(each.owner), each.name): each for each in _buffers(layers)}
    given |= {(id(each.owner), each.name): each for each in found if each.name in each.owner}
    former = [(owner, name, owner[name]) for owner, name, _, _ in given.values()]
    copies: dict[int, torch.Tensor] = {}  # Layers may share buffers.
    try:
        for owner, name, buffer, value in given.values():
            owner[name] = copies.setdefault(id(buffer), value.clone())
        yield
    finally:
        for owner, name, buffer in former:
            owner[name] = buffer
