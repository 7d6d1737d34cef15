"""Measures the memory of each layer of a module, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels._torch_private import TorchDispatchMode
from pipekernels.device.restoring import restore_despite_interrupt
from pipekernels.pipeline.planning.cost import Bytes
from pipekernels.pipeline.planning.profile import (
    LayerRun,
    Outputs,
    cloned,
    detached,
    measure_layers,
)
from pipekernels.pipeline.values.structure import tensors_in


@restore_despite_interrupt
def measure_bytes(module: nn.Sequential, sample: Any, device: torch.device) -> list[Bytes]:
    """The memory of every layer on the micro-batch ``sample``: the storages that its operations
    make and that are alive after each operation, and those that its graph alone keeps alive.

    Not measured: scratch memory inside an operation, and the allocator's rounding.
    """
    return measure_layers(module, sample, device, _Tally().count)


class LiveStorages(TorchDispatchMode):
    """Watches the storages that operations make while it is active, except those of ``known``."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self._made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        strided = [tensor for tensor in tensors_in(result) if tensor.layout is torch.strided]
        for ref, size in _storage_bytes(strided).items():
            if ref not in self._known:
                self._made[ref] = size
        self.peak = max(self.peak, sum(self.alive().values()))
        return result

    def alive(self) -> dict[StorageWeakRef, int]:
        """The storages that still exist, and their bytes."""
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        return dict(self._made)


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
        trainable = [p for p in run.layer.parameters() if p.requires_grad]
        inputs = tensors_in(run.value)
        input_bytes = _nbytes(inputs)
        received = _storage_bytes(inputs)
        entering = received | _storage_bytes(run.popped)
        first = self._counted is None
        counted = set(received)
        if self._counted is not None:
            counted = set(compress(map(_storage, inputs), self._counted))
        live = LiveStorages([*inputs, *tensors_in(run.popped), *weights])
        del inputs
        with live:
            outputs = run.forward()
        passed_on = detached(cloned(outputs))
        returned = [_storage(tensor) for tensor in tensors_in(outputs[0])]
        wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        root = _Root.apply(*wanted) if wanted else None
        one = torch.ones(())
        del outputs, wanted
        # Only the graph is left: the storages alive now are those that the backward needs.
        made = live.alive()
        freed = sum(nbytes for ref, nbytes in entering.items() if ref.expired())
        needed = made | {ref: n for ref, n in entering.items() if not ref.expired()}
        if root is not None:
            with live:
                torch.autograd.backward(root, one)

        kept = {ref: nbytes for ref, nbytes in needed.items() if ref not in counted}
        self._counted = [ref in counted or ref in kept for ref in returned]
        sizes = Bytes(
            kept=sum(kept.values()),
            entry=0 if first else sum(n for ref, n in received.items() if ref not in kept),
            inputs=input_bytes,
            outputs=_nbytes(tensors_in(passed_on[0])),
            working=live.peak - sum(made.values()) + freed,
            trainable=_nbytes(trainable),
            constant=_nbytes(weights) - _nbytes(trainable),
        )
        return sizes, passed_on


class _Root(torch.autograd.Function):
    """A scalar that keeps the graph of ``tensors``, not their memory, and gives them gradients. Not
    gradient edges, which in torch 2.6 do not keep a graph that ends in a custom function."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.layouts = [(torch.empty_like(t, device="meta"), t.device) for t in tensors]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Held to the end of the backward, as a pipe may hold those that it receives.
        ctx.grads = tuple(torch.ones_like(layout, device=device) for layout, device in ctx.layouts)
        return ctx.grads


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(value: Any) -> dict[StorageWeakRef, int]:
    return {_storage(t): t.untyped_storage().nbytes() for t in tensors_in(value)}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
