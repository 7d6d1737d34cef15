"""Stages as a forward left them, which is how its backward recomputes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipekernels.pipeline.stage.parameters import (
    StageParameters,
    frozen_again,
    installed,
    surely,
)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written to."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class AsInForward:
    """The stages' layers as they are when this object is made, at the end of a forward: until then they
    may still make what they are made of.

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
        """Have layers in their modes, and their parameters' aliases, what was frozen and buffers in their
        places, while the body runs. Buffers keep the values that they have by now.

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

        try:
            for layer, mode in modes:
                layer.training = not mode
            for owner, name, buffer, _ in buffers:
                owner[name] = buffer
            with installed(self._parameters), frozen_again(self._parameters):
                yield
        finally:
            surely(put_back)

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
                f"stage {index} is to be recomputed, but {what} after its forward; do that after the "
                "backward, or use checkpoint='never'"
            )

    def _current_versions(self) -> list[list[int]]:
        return [versions(parameters.all()) for parameters in self._parameters]


def _makeup(stage: nn.Module) -> list[object]:
    # keys(): those of a scripted layer cannot be iterated over.
    return [(layer, type(layer), *layer._parameters.keys()) for layer in stage.modules()]
