"""Gives a recomputation the buffers that its forward had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipekernels.pipeline.stage.parameters import versions


@dataclass(slots=True)
class BufferSnapshot:
    """A buffer that requires no gradient, as it was before the forward of a micro-batch."""

    owner: dict[str, Any]
    """The ``_buffers`` of its layer."""
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy, or None if the buffer itself still has the value."""


def _without_grad(
    layers: Sequence[nn.Module],
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The buffers that require no gradient, as (``_buffers`` of the layer, name there, buffer):
    graphs must use the others themselves, not copies."""
    for layer in layers:
        for name, buffer in layer._buffers.items():
            if buffer is not None and not buffer.requires_grad:
                yield layer._buffers, name, buffer


def snapshot_buffers(layers: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """The buffers of ``layers``, with copies of all: any of them may be changed by the forward."""
    return [
        BufferSnapshot(owner, name, buffer, versions([buffer])[0], buffer.clone())
        for owner, name, buffer in _without_grad(layers)
    ]


def drop_unchanged_copies(
    found: Sequence[BufferSnapshot], earlier: Sequence[Sequence[BufferSnapshot]]
) -> None:
    """Drop the copies of buffers that a forward has not changed from ``found``, those before it.
    Entries in ``earlier``, of earlier micro-batches, get their copy back if it was the first to
    change their buffer."""
    for entry in found:
        if versions([entry.buffer]) == [entry.version]:
            entry.value = None
            continue
        for other in (other for entries in earlier for other in entries):
            if other.buffer is entry.buffer and other.version == entry.version:
                other.value = entry.value


@contextmanager
def buffers_of_forward(
    layers: Sequence[nn.Module], found: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """In the body, a recomputation, give ``layers`` copies of their buffers, with the values that
    ``found`` has of before the forward: that has already updated the buffers."""
    given = {(id(o), name): (o, name, buffer, buffer) for o, name, buffer in _without_grad(layers)}
    for entry in found:
        owner, name, buffer = entry.owner, entry.name, entry.buffer
        if name in owner:
            value = buffer if entry.value is None else entry.value
            given[id(owner), name] = owner, name, buffer, value
    former = [(owner, name, owner[name]) for owner, name, _, _ in given.values()]
    copies: dict[int, torch.Tensor] = {}  # Layers may share buffers.
    try:
        for owner, name, buffer, value in given.values():
            owner[name] = copies.setdefault(id(buffer), value.clone())
        yield
    finally:
        for owner, name, buffer in former:
            owner[name] = buffer
