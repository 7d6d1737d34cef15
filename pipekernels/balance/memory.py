"""Measures the memory of each layer of a module, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels._torch_private import TorchDispatchMode
from pipekernels.balance.profile import LayerRun, Outputs, cloned, detached, measure_layers
from pipekernels.pipeline.values.structure import tensors_in


class Bytes(NamedTuple):
    """Memory of one layer on one micro-batch.

    Attributes:
        kept: kept for its backward, without what earlier layers keep and without the sample.
        trainable: its trainable parameters.
        constant: its other parameters, and its buffers.
    """

    kept: int
    trainable: int
    constant: int


def measure_bytes(module: nn.Sequential, sample: Any, device: torch.device) -> list[Bytes]:
    """The memory of every layer on the micro-batch ``sample``. A layer keeps the storages that its
    graph alone keeps alive."""
    return measure_layers(module, sample, device, _Tally().count)


class _MadeStorages(TorchDispatchMode):
    """Watches the storages that operations make while it is active, except those of ``known``."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        strided = [tensor for tensor in tensors_in(result) if tensor.layout is torch.strided]
        for ref, size in _storage_bytes(strided).items():
            if ref not in self._known:
                self.made[ref] = size
        return result


class _Tally:
    """Counts the bytes of layers, which come in order: a storage once, for the first layer that
    keeps it, and a skip as made by the layer that pops it."""

    def __init__(self) -> None:
        self._counted: list[bool] | None = None
        """For each input of the next layer, whether an earlier layer keeps it. The caller keeps
        those of the first layer."""

    def count(self, run: LayerRun) -> tuple[Bytes, Outputs]:
        """The bytes of the next layer."""
        weights = [*run.layer.parameters(), *run.layer.buffers()]
        inputs = tensors_in(run.value)
        received = _storage_bytes(inputs)
        entering = received | _storage_bytes(run.popped)
        counted = set(received)
        if self._counted is not None:
            counted = set(compress(map(_storage, inputs), self._counted))
        storages = _MadeStorages([*inputs, *tensors_in(run.popped), *weights])
        del inputs
        with storages:
            outputs = run.forward()
        passed_on = detached(cloned(outputs))
        returned = [_storage(tensor) for tensor in tensors_in(outputs[0])]
        wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        root = _Root.apply(*wanted) if wanted else None
        del outputs, wanted
        # Only the graph is left: the storages alive now are those that the backward needs.
        kept = {
            ref: nbytes
            for ref, nbytes in (storages.made | entering).items()
            if not ref.expired() and ref not in counted
        }
        del root
        self._counted = [ref in counted or ref in kept for ref in returned]
        trainable = _nbytes(p for p in run.layer.parameters() if p.requires_grad)
        sizes = Bytes(sum(kept.values()), trainable, _nbytes(weights) - trainable)
        return sizes, passed_on


class _Root(torch.autograd.Function):
    """A scalar that keeps the graph of ``tensors``, not their memory. Not gradient edges, which in
    torch 2.6 do not keep a graph that ends in a custom function."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(value: Any) -> dict[StorageWeakRef, int]:
    return {_storage(t): t.untyped_storage().nbytes() for t in tensors_in(value)}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
