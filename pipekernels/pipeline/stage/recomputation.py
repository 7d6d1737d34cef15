"""Stages as a forward left them, which is how its backward recomputes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipekernels.device.restoring import restoring
from pipekernels.pipeline.stage.parameters import StageParameters, frozen_again, installed


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass(slots=True)
class FoundBuffer:
    """A buffer as the forward of a micro-batch found it, without gradient."""

    owner: dict[str, Any]
    """The ``_buffers`` of its layer."""
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy; None where the buffer itself still has the value."""


def found_buffers(stages: Sequence[nn.Module]) -> list[FoundBuffer]:
    """The buffers of ``stages``, with copies of all: nobody knows which ones a forward will
    change."""
    return [
        FoundBuffer(layer._buffers, name, buffer, versions([buffer])[0], buffer.clone())
        for stage in stages
        for layer in stage.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None and not buffer.requires_grad
    ]


def keep_changed(
    found: Sequence[FoundBuffer], changing: set[int], earlier: Sequence[Sequence[FoundBuffer]]
) -> None:
    """Drop the copies of buffers that are never changed.

    Args:
        found: before a forward that has ended.
        changing: ids of buffers that a forward has changed in place, completed here. That it
            changes one again shows in no version if it is replayed as a CUDA graph.
        earlier: what forwards before this one found, which did not change all of these.
    """
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
def with_found(found: Sequence[FoundBuffer]) -> Iterator[None]:
    """Have layers find the same buffers, with the same values, while the body runs."""
    replaced = [
        (entry, entry.owner[entry.name])
        for entry in found
        if entry.name in entry.owner and entry.owner[entry.name] is not entry.buffer
    ]
    # In their own memory, where CUDA graphs look for them, and past the version counters: graphs of
    # other micro-batches may have saved the buffers, and find them unchanged afterwards.
    changed = [
        (entry.buffer.data, entry.value, entry.buffer.clone())
        for entry in found
        if entry.value is not None
    ]

    def put_back() -> None:
        for data, _, now in changed:
            data.copy_(now)
        for entry, now in replaced:
            entry.owner[entry.name] = now

    with restoring(put_back):
        for entry, _ in replaced:
            entry.owner[entry.name] = entry.buffer
        for data, value, _ in changed:
            data.copy_(value)
        yield


class AsInForward:
    """The stages' layers as they are when this object is made, at the end of a forward: until then
    they may still make what they are made of.

    Args:
        stages: the stages.
        parameters: those of each.
    """

    def __init__(self, stages: Sequence[nn.Module], parameters: Sequence[StageParameters]) -> None:
        self._stages = stages
        self._parameters = parameters
        self._makeup = [_makeup(stage) for stage in stages]
        self._versions = self._current_versions()
        layers = [layer for stage in stages for layer in stage.modules()]
        self._modes = [(layer, layer.training) for layer in layers]
        self._buffers = [
            (layer._buffers, name, buffer)
            for layer in layers
            for name, buffer in layer._buffers.items()
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have layers in their modes, and their parameters' aliases, what was frozen and buffers in
        their places, while the body runs. Values of buffers are left to :func:`with_found`.

        Raises:
            RuntimeError: what a recomputation needs, and cannot be brought back, has changed.
        """
        self._check()
        modes = [(layer, layer.training) for layer, was in self._modes if layer.training != was]
        buffers = [
            (owner, name, buffer, owner[name])
            for owner, name, buffer in self._buffers
            if name in owner and owner[name] is not buffer
        ]

        def put_back() -> None:
            for layer, mode in modes:
                layer.training = mode
            for owner, name, _, now in buffers:
                owner[name] = now
            # Layers may write to their parameters, and another backward may follow.
            self._versions = self._current_versions()

        with restoring(put_back):
            for layer, mode in modes:
                layer.training = not mode
            for owner, name, buffer, _ in buffers:
                owner[name] = buffer
            with installed(self._parameters), frozen_again(self._parameters):
                yield

    def _check(self) -> None:
        versions = self._current_versions()
        for index, stage in enumerate(self._stages):
            if _makeup(stage) != self._makeup[index]:
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


def _makeup(stage: nn.Module) -> list[object]:
    # keys(): those of a scripted layer cannot be iterated over.
    return [(layer, type(layer), *layer._parameters.keys()) for layer in stage.modules()]
