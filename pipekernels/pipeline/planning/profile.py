"""Measures the seconds and bytes of each layer of a module.

Each layer runs as a temporary copy, on the outputs of the previous one. So the module and the
caller's sample are not changed, and only one layer at a time has to fit on the device. Forward
hooks run as in training; side effects outside the layer (files, ``random``, NumPy's generator) are
not undone.
"""

from __future__ import annotations

import copy
import math
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels._torch_private import TorchDispatchMode, tree_map_only
from pipekernels.device.restoring import restore_despite_interrupt
from pipekernels.pipeline.stage.partition import has_collectives, layers
from pipekernels.pipeline.stage.random_state import preserved
from pipekernels.pipeline.stage.skip import Key, carried
from pipekernels.pipeline.values.micro_batch import rows_of
from pipekernels.pipeline.values.structure import flatten, tensors_in

PASSES = 3
"""The fewest times that a layer is timed; the fastest counts."""
HAND_OFFS = 200
"""Number of measured hand-offs between threads; the median counts, because the operating system's
scheduler is part of the cost."""
COPIES = 5
"""Number of measured copies between devices; the fastest counts."""

Device = torch.device | int | str


class Seconds(NamedTuple):
    """Times of one layer on one micro-batch."""

    forward: float
    backward: float
    input_backward: float
    """The part of ``backward`` that computes gradients of inputs; 0 if it was not measured."""


@dataclass(frozen=True)
class Bytes:
    """Memory of one layer on one micro-batch."""

    kept: int
    """Memory kept for its backward, without what earlier layers keep and without the sample."""
    entry: int
    """Memory of inputs that is not in ``kept``, which a stage keeps if it begins with this layer.
    (If the layer returns its inputs and a later one keeps them, they count twice.)"""
    inputs: int
    """Its inputs."""
    outputs: int
    """Its outputs."""
    working: int
    """Temporary memory of its forward and backward, at the peak, without ``kept``."""
    trainable: int
    """Its trainable parameters."""
    constant: int
    """Its other parameters, and its buffers."""


@restore_despite_interrupt
def measure_seconds(
    module: nn.Sequential,
    samples: Sequence[Any],
    device: torch.device,
    *,
    timeout: float,
    split: bool = False,
) -> list[list[Seconds]]:
    """Time every layer on every sample, in turn, repeatedly until ``timeout``.

    The smallest of a layer's times counts, because disturbances only make it longer. Gradients are
    added to existing ones, as from the second micro-batch on.

    Args:
        module: its layers are timed in training mode, or in their own modes if it is in training.
        samples: at least one argument of the first layer.
        device: where to run copies of the layers.
        timeout: in seconds. Each layer is timed at least ``PASSES`` times, after a warm-up.
        split: whether to time the gradients of inputs separately.

    Returns:
        For each sample, a time per layer.

    Raises:
        ValueError: ``timeout`` is negative or infinite, or a layer has collectives.
    """
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; it must be a number of seconds, at least 0")
    for name, part in module.named_modules():
        # An extra call on one rank would pair with later calls of the others, perhaps silently.
        if has_collectives(part):
            raise ValueError(
                f"{name!r}, a {type(part).__name__}, has collectives, which ranks would call a "
                "different number of times while they measure; measure first, then shard "
                "(tensor_parallelize)"
            )
    begin = perf_counter()
    passes: list[list[list[Seconds]]] = []
    while len(passes) < 1 + PASSES or perf_counter() - begin < timeout:
        times = []
        for sample in samples:
            with _sandbox(device):
                times.append([_time(run, split) for run in _chain(module, sample, device)])
        passes.append(times)
    return [
        [Seconds(*map(min, *of_layer)) for of_layer in zip(*of_sample, strict=True)]
        for of_sample in zip(*passes[1:], strict=True)
    ]


@restore_despite_interrupt
def measure_bytes(module: nn.Sequential, sample: Any, device: torch.device) -> list[Bytes]:
    """Measure the memory of every layer: the storages that its operations make and that are alive
    after each operation, and those that its graph alone keeps alive. Works on any device.

    Not measured: scratch memory inside an operation, and the allocator's rounding.

    Args:
        module: its layers run in training mode, or in their own modes if it is in training.
        sample: one micro-batch: the argument of the first layer.
        device: where to run.
    """
    with _sandbox(device):
        return _tally([_trace(run) for run in _chain(module, sample, device)])


def measure_hand_off(devices: Sequence[torch.device]) -> list[tuple[int, float]]:
    """Time the passing of a micro-batch from one lane to the next, as (bytes, seconds). On CPUs a
    reference goes from thread to thread, between devices bytes are copied, on one accelerator it
    costs nothing. ``devices`` are one per lane."""
    if all(device.type == "cpu" for device in devices):
        return [(0, _thread_hand_off())]
    others = [device for device in devices if device != devices[0]]
    if not others:
        return [(0, 0.0)]
    return [(nbytes, _copy_seconds(devices[0], others[0], nbytes)) for nbytes in (2**12, 2**24)]


def _thread_hand_off() -> float:
    there: SimpleQueue[bool] = SimpleQueue()
    back: SimpleQueue[bool] = SimpleQueue()

    def answer() -> None:
        while there.get():
            back.put(True)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    try:
        for _ in range(HAND_OFFS):
            begin = perf_counter()
            there.put(True)
            back.get()
            times.append((perf_counter() - begin) / 2)
    finally:
        there.put(False)
        thread.join()
    return statistics.median(times)


def _copy_seconds(source: torch.device, target: torch.device, nbytes: int) -> float:
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=source)
    times = []
    for _ in range(COPIES):
        begin = _now(source, target)
        tensor.to(target)
        times.append(_now(source, target) - begin)
    return min(times)


def _now(*devices: torch.device) -> float:
    """Wait for all work on ``devices``; returns the time."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return perf_counter()


def batch_size(sample: Any) -> int:
    """Rows of a mini-batch.

    Raises:
        TypeError: there is no tensor in ``sample``.
        ValueError: it cannot be cut along dimension 0: a tensor has none, or they differ there.
    """
    return rows_of(flatten(sample, "the sample")[0], 0, "sample tensor")


def first_rows(sample: Any, rows: int) -> Any:
    """A micro-batch: the first ``rows`` rows of every tensor in ``sample`` that is cut up."""
    tensors, structure = flatten(sample, "the sample")
    return structure.build([tensor[:rows] for tensor in tensors])


class _LayerRun:
    """One run of a copy of a layer, with its own inputs. The user calls :meth:`forward`, and sets
    ``result`` and ``stashed``, the inputs of later layers.

    Args:
        layer: the copy.
        value: its argument.
        popped: the skips that it pops.
        device: of all of them.
    """

    def __init__(
        self, layer: nn.Module, value: Any, popped: dict[Key, Any], device: torch.device
    ) -> None:
        self.layer = layer
        self.device = device
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        leaves = _detached((value, popped))
        self.leaves = tensors_in(leaves)
        # Clones, because autograd forbids layers to modify leaves in place.
        self.value, self.popped = tree_map_only(torch.Tensor, torch.Tensor.clone, leaves)
        self.result: Any = None
        self.stashed: dict[Key, Any] = {}

    def forward(self) -> tuple[Any, dict[Key, Any]]:
        """Run the layer, once, and drop the inputs; returns its result and what it stashes."""
        value, self.value = self.value, None
        with carried(self.popped) as skips:
            self.popped = {}
            return self.layer(value), skips


def _chain(module: nn.Sequential, sample: Any, device: torch.device) -> Iterator[_LayerRun]:
    value = tree_map_only(torch.Tensor, lambda t: t.to(device), _detached(sample))
    skips: dict[Key, Any] = {}
    # Layers share namespaces, so deepcopy must not copy them with each layer.
    namespaces = {ns for layer in layers(module) for ns, _ in _skips(layer, "stashable")}
    for index, layer in enumerate(layers(module)):
        weights = chain(layer.parameters(), layer.buffers())
        if device.type != "meta" and any(tensor.is_meta for tensor in weights):
            raise ValueError(
                f"layer {index} has weights on the meta device, which are nothing to measure on "
                f"{device}; give them memory first (module.to_empty(device=...)) and some values"
            )
        duplicate = copy.deepcopy(layer, {id(ns): ns for ns in namespaces}).to(device)
        if not module.training:
            duplicate.train()
        popped = {key: skips.pop(key) for key in _skips(duplicate, "poppable") if key in skips}
        run = _LayerRun(duplicate, value, popped, device)
        yield run
        value = run.result
        skips |= run.stashed


def _skips(layer: nn.Module, which: str) -> list[Key]:
    return [
        key for part in layer.modules() if hasattr(part, which) for key in getattr(part, which)()
    ]


@contextmanager
def _sandbox(device: torch.device) -> Iterator[None]:
    with preserved([device]), torch.inference_mode(False), torch.enable_grad():
        yield


def _detached(value: Any) -> Any:
    """``value`` without its graph; its tensors keep their ``requires_grad``."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


def _time(run: _LayerRun, split: bool) -> Seconds:
    trainable = any(p.requires_grad for p in run.layer.parameters())
    begin = _now(run.device)
    outputs = run.forward()
    forward = _now(run.device) - begin
    run.result, run.stashed = _detached(outputs)

    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    grads = [torch.ones_like(root) for root in roots]
    leaves = [leaf for leaf in run.leaves if leaf.requires_grad]
    if not roots:
        return Seconds(forward, 0.0, 0.0)
    of_inputs = 0.0
    if split and leaves and trainable:
        begin = _now(run.device)
        torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
        of_inputs = _now(run.device) - begin
    begin = _now(run.device)
    torch.autograd.backward(roots, grads)
    backward = _now(run.device) - begin
    if split and not trainable:
        of_inputs = backward
    return Seconds(forward, backward, of_inputs)


class LiveStorages(TorchDispatchMode):
    """Watches the storages that operations make while it is active.

    Args:
        known: tensors whose storages do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self._made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.layout is torch.strided and _storage(tensor) not in self._known:
                self._made[_storage(tensor)] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive().values()))
        return result

    def alive(self) -> dict[StorageWeakRef, int]:
        """The storages that still exist, and their bytes."""
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        return self._made


@dataclass
class _Trace:
    """The storages that a layer received from the previous one, returned (``given``) and keeps; and
    sizes that do not depend on other layers. Popped skips count as made by the layer."""

    received: list[StorageWeakRef]
    given: list[StorageWeakRef]
    kept: list[StorageWeakRef]
    nbytes: dict[StorageWeakRef, int]
    sizes: dict[str, int]


def _trace(run: _LayerRun) -> _Trace:
    parameters, buffers = list(run.layer.parameters()), list(run.layer.buffers())
    sizes = {
        "trainable": _nbytes(p for p in parameters if p.requires_grad),
        "constant": _nbytes([*(p for p in parameters if not p.requires_grad), *buffers]),
        "inputs": _nbytes(tensors_in(run.value)),
    }
    received = [_storage(tensor) for tensor in tensors_in(run.value)]
    nbytes = _storage_bytes((run.value, run.popped))
    inputs = list(nbytes)
    live = LiveStorages([*tensors_in((run.value, run.popped)), *parameters, *buffers])
    with live:
        outputs = run.forward()
    sizes["outputs"] = _nbytes(tensors_in(outputs[0]))
    given = [_storage(tensor) for tensor in tensors_in(outputs[0])]
    nbytes |= _storage_bytes(outputs)
    run.result, run.stashed = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        outputs,
    )
    wanted = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    grads: list[torch.Tensor] = []
    root = _Root.apply(grads, *wanted) if wanted else None
    one = torch.ones(())
    del outputs, wanted
    # Only the graph is left: the storages alive now are those that the backward needs.
    made = live.alive()
    kept = [*made, *(ref for ref in inputs if not ref.expired())]
    lost = [ref for ref in inputs if ref.expired()]
    nbytes |= made
    with live:
        tensors = tensors_in((run.result, run.stashed))
        grads += [torch.ones_like(tensor) for tensor in tensors if tensor.requires_grad]
        if root is not None:
            torch.autograd.backward(root, one)
    working = live.peak - sum(made.values()) + sum(nbytes[ref] for ref in lost)
    return _Trace(received, given, kept, nbytes, {**sizes, "working": working})


class _Root(torch.autograd.Function):
    """A scalar that keeps the graph of ``tensors``, not their memory; ``grads`` are set later. Not
    gradient edges, which in torch 2.6 do not keep a graph that ends in a custom function."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.grads


def _tally(traces: Sequence[_Trace]) -> list[Bytes]:
    """Count every storage once, for the first layer that keeps it."""
    origin: dict[StorageWeakRef, StorageWeakRef] = {}  # Of a layer's input: the producer's storage.
    nbytes: dict[StorageWeakRef, int] = {}
    for trace in reversed(traces):
        nbytes |= trace.nbytes
    for before, after in pairwise(traces):
        for made, received in zip(before.given, after.received, strict=True):
            origin[received] = origin.get(made, made)
    keeper: dict[StorageWeakRef, int] = {}
    for i, trace in enumerate(traces):
        for ref in trace.kept:
            keeper.setdefault(origin.get(ref, ref), i)
    sample = set(traces[0].received)
    result = []
    for i, trace in enumerate(traces):
        kept = {origin.get(ref, ref) for ref in trace.kept} - sample
        entry = {origin.get(ref, ref) for ref in trace.received} if i else set()
        result.append(
            Bytes(
                kept=sum(nbytes[ref] for ref in kept if keeper[ref] == i),
                entry=sum(nbytes[ref] for ref in entry if ref in sample or keeper.get(ref) != i),
                **trace.sizes,
            )
        )
    return result


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(value: Any) -> dict[StorageWeakRef, int]:
    return {_storage(t): t.untyped_storage().nbytes() for t in tensors_in(value)}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
