"""Restores the state in which a forward ran its stages, for the recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipekernels.pipeline.stage.parameters import (
    StageParameters,
    freeze_as_in_forward,
    installed,
    replaced,
)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The version counters of ``tensors``, 0 for inference tensors."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


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


def _without_grad(stages: Sequence[nn.Module]) -> Iterator[Entry]:
    """The buffers that require no gradient: graphs must use the others themselves, not copies."""
    for layer in (layer for stage in stages for layer in stage.modules()):
        for name, buffer in layer._buffers.items():
            if buffer is not None and not buffer.requires_grad:
                yield layer._buffers, name, buffer


def snapshot_buffers(stages: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """The buffers of ``stages``, with copies of all: any of them may be changed by the forward."""
    return [
        BufferSnapshot(owner, name, buffer, versions([buffer])[0], buffer.clone())
        for owner, name, buffer in _without_grad(stages)
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
    stages: Sequence[nn.Module], found: Sequence[BufferSnapshot]
) -> Iterator[None]:
    """In the body, a recomputation, give the layers of ``stages`` copies of their buffers, with the
    values that ``found`` has of before the forward: that has already updated the buffers."""
    # The values are also written to the buffers' own memory, which a layer's CUDA graph may read,
    # through .data, which changes no version counter: graphs of other micro-batches may have saved
    # the buffers, which have their values back when the body ends.
    changed = [(e.buffer.data, e.value, e.buffer.clone()) for e in found if e.value is not None]
    entries = [*_without_grad(stages), *((e.owner, e.name, e.buffer) for e in found)]
    buffers = {(id(owner), name): (owner, name, b) for owner, name, b in entries if name in owner}
    try:
        for data, value, _ in changed:
            data.copy_(value)
        distinct = {id(buffer): buffer for _, _, buffer in buffers.values()}  # Layers may share.
        copies = {key: buffer.clone() for key, buffer in distinct.items()}
        with replaced((owner, name, copies[id(b)]) for owner, name, b in buffers.values()):
            yield
    finally:
        for data, _, now in changed:
            data.copy_(now)


class ForwardState:
    """The state of the stages' layers, with ``parameters``, when this object is made. That is at
    the end of a forward, in which layers may still create submodules, parameters and buffers."""

    def __init__(self, stages: Sequence[nn.Module], parameters: Sequence[StageParameters]) -> None:
        self._stages = stages
        self._parameters = parameters
        self._layers = [_layers_with_parameter_names(stage) for stage in stages]
        self._versions = self._current_versions()
        layers = [layer for stage in stages for layer in stage.modules()]
        self._modes = [(layer, layer.training) for layer in layers]
        self._buffers = [
            (layer._buffers, name, buffer)
            for layer in layers
            for name, buffer in layer._buffers.items()
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give layers their training flags, aliases, frozen parameters and buffers of the forward,
        in the body. RuntimeError if something else that a recomputation needs has changed."""
        self._check()
        modes = [(layer, layer.training) for layer, was in self._modes if layer.training != was]
        buffers = (
            (owner, name, buffer)
            for owner, name, buffer in self._buffers
            if name in owner and owner[name] is not buffer
        )
        try:
            with (
                replaced(buffers),
                installed(self._parameters),
                freeze_as_in_forward(self._parameters),
            ):
                for layer, mode in modes:
                    layer.training = not mode
                yield
        finally:
            for layer, mode in modes:
                layer.training = mode
            # Layers may write to their parameters, and another backward may follow.
            self._versions = self._current_versions()

    def _check(self) -> None:
        versions = self._current_versions()
        for index, stage in enumerate(self._stages):
            if _layers_with_parameter_names(stage) != self._layers[index]:
                what = "its layers, or which parameters they have, were changed"
            elif versions[index] != self._versions[index]:
                what = "its parameters were modified in place"
            else:
                continue
            raise RuntimeError(
                f"stage {index} is to be recomputed, but {what} after its forward; do that after "
                "the backward, or use checkpoint='never'"
            )

    def _current_versions(self) -> list[list[int]]:
        return [versions(parameters.all()) for parameters in self._parameters]


def _layers_with_parameter_names(stage: nn.Module) -> list[object]:
    # keys(): the parameter dict of a scripted layer cannot be iterated over.
    return [(layer, type(layer), *layer._parameters.keys()) for layer in stage.modules()]
