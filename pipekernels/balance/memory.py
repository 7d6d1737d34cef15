"""Measures the memory of each layer of a module, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, repeat
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels._torch_private import TorchDispatchMode
from pipekernels.balance.profile import Values, cloned, detached, measure_layers, run_layer
from pipekernels.pipeline.values.structure import tensors_in


def measure_bytes(module: nn.Sequential, sample: Any, device: torch.device) -> list[int]:
    """What every layer keeps for its backward of the micro-batch ``sample``: the storages that its
    graph alone keeps alive, without ``sample`` and what earlier layers keep."""
    return measure_layers(module, sample, device, _Tally().count)


class _MadeStorages(TorchDispatchMode):
    """The sizes of the storages that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made |= _storage_bytes(result)
        return result


class _Tally:
    """Counts the bytes of layers, which come in order: a storage once, for the first layer that
    keeps it, and a skip as made by the layer that pops it."""

    def __init__(self) -> None:
        # For each input of the next layer, whether an earlier layer keeps it. The caller keeps
        # those of the first one.
        self._counted: Iterable[bool] = repeat(True)

    def count(self, layer: nn.Module, inputs: list[Values]) -> tuple[int, Values]:
        """The bytes of the next layer."""
        received, popped = map(_storage_bytes, inputs[0])
        counted = set(compress(received, self._counted))
        with _MadeStorages() as storages:
            outputs = run_layer(layer, inputs)
        passed_on = detached(cloned(outputs))
        returned = [_storage(tensor) for tensor in tensors_in(outputs[0])]
        # Scalars, which keep the graphs alive, but not the outputs.
        roots = [tensor.sum() for tensor in tensors_in(outputs) if tensor.requires_grad]
        del outputs
        weights = [*layer.parameters(), *layer.buffers()]
        known = counted | _storage_bytes(weights).keys()
        kept = {
            ref: nbytes
            for ref, nbytes in (storages.made | received | popped).items()
            if not ref.expired() and ref not in known
        }
        del roots
        self._counted = [ref in counted or ref in kept for ref in returned]
        return sum(kept.values()), passed_on


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(value: Any) -> dict[StorageWeakRef, int]:
    strided = [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]
    return {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in strided}
