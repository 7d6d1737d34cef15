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


Entry = tuple[dict[str, Any], str, torch.Tensor]
"""A buffer: the ``_buffers`` of its layer, its name there, and itself."""


def _without_grad(layers: Sequence[nn.Module]) -> Iterator[Entry]:
    """The buffers that require no gradient: graphs must use the others themselves, not copies."""
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
    found: Sequence[BufferSnapshot], changing: set[int], earlier: Sequence[Sequence[BufferSnapshot]]
) -> None:
    """Drop the copies of buffers that forwards do not change from ``found``, those before a forward
    that has ended. ``changing`` gets the ids of buffers that forwards change; it is kept across
    mini-batches, as a layer that replays a CUDA graph changes no version counter. Entries in
    ``earlier``, of earlier micro-batches, get their copy back if this forward was the first to
    change their buffer."""
    for entry in found:
        if versions([entry.buffer]) != [entry.version] and id(entry.buffer) not in changing:
            changing.add(id(entry.buffer))
            for other in (other for entries in earlier for other in entries):
                if other.buffer is entry.buffer and other.version == entry.version:
                    other.value = entry.value
    for entry in found:
        if id(entry.buffer) not in changing:
            entry.value = None


@contextmanager
def buffers_of_forward(
    layers: Sequence[nn.Module], found: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """In the body, a recomputation, give ``layers`` copies of their buffers, with the values that
    ``found`` has of before the forward: that has already updated the buffers."""
    # The values are also written to the buffers' own memory, which a layer's CUDA graph may read,
    # through .data, which changes no version counter: graphs of other micro-batches may have saved
    # the buffers, which have their values back when the body ends.
    changed = [(e.buffer.data, e.value, e.buffer.clone()) for e in found if e.value is not None]
    entries = [*_without_grad(layers), *((e.owner, e.name, e.buffer) for e in found)]
    buffers = {(id(owner), name): (owner, name, b) for owner, name, b in entries if name in owner}
    former = [(owner, name, owner[name]) for owner, name, _ in buffers.values()]
    try:
        for data, value, _ in changed:
            data.copy_(value)
        copies: dict[int, torch.Tensor] = {}  # Layers may share buffers.
        for owner, name, buffer in buffers.values():
            owner[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for owner, name, buffer in former:
            owner[name] = buffer
        for data, _, now in changed:
            data.copy_(now)
