"""Measures the seconds and the memory of each layer of a module.

Each layer runs as a temporary copy, on the outputs of the previous one. So the module and the
caller's sample are not changed, and only one layer at a time has to fit on the device. Forward
hooks run as in training; side effects outside the layer (files, ``random``, NumPy's generator) are
not undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, repeat
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipekernels._torch_private import TorchDispatchMode, tree_map_only
from pipekernels.comm import Communicator
from pipekernels.ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.context import generators_of, preserved
from pipekernels.pipeline.microbatch import rows_of
from pipekernels.pipeline.nested import flatten, tensors_in
from pipekernels.pipeline.partition import layers
from pipekernels.pipeline.skip import Key, carried, skips_of

PASSES = 3
"""The fewest times that a layer is timed; the fastest counts."""

T = TypeVar("T")


def measure_seconds(
    module: nn.Sequential, sample: Any, device: torch.device, *, timeout: float
) -> list[float]:
    """For each layer, the seconds of a forward and a backward on ``device``; ``sample`` is the
    argument of the first.

    The smallest time counts, because disturbances only make it longer. Gradients are added to
    existing ones, as from the second microbatch on. A ValueError if ``timeout`` is negative or
    infinite, or a layer has collectives.
    """
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; it must be a number of seconds, at least 0")
    for name, part in module.named_modules():
        # An extra call on one rank would pair with later calls of the others, perhaps silently.
        on_mesh = any(hasattr(each, "device_mesh") for each in part._parameters.values())
        if on_mesh or any(isinstance(each, Communicator) for each in vars(part).values()):
            raise ValueError(
                f"{name!r}, a {type(part).__name__}, has collectives, which ranks would call a "
                "different number of times while they measure; measure first, then shard "
                "(tensor_parallelize)"
            )

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    def seconds(layer: nn.Module, inputs: list[Values]) -> tuple[float, Values]:
        begin = now()
        outputs = run_layer(layer, inputs)
        roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return now() - begin, detached(outputs)

    # Layers take turns, so a disturbance spoils a pass, not a layer. The first pass warms up.
    begin = now()
    passes: list[list[float]] = []
    while len(passes) < 1 + PASSES or now() - begin < timeout:
        passes.append(measure_layers(module, sample, device, seconds))
    return list(map(min, zip(*passes[1:], strict=True)))


def measure_bytes(module: nn.Sequential, sample: Any, device: torch.device) -> list[int]:
    """What every layer keeps for its backward of the microbatch ``sample``: the storages that its
    graph alone keeps alive, without ``sample``. A storage is counted once, for the first layer that
    keeps it, and a skip as made by the layer that pops it."""
    # Whether each input of the next layer is counted. The caller keeps the first layer's inputs.
    are_counted: Iterable[bool] = repeat(True)

    def kept_bytes(layer: nn.Module, inputs: list[Values]) -> tuple[int, Values]:
        nonlocal are_counted
        # Storages that exist before the layer runs, then those that it makes.
        received, popped = map(_storage_bytes, inputs[0])
        counted = set(compress(received, are_counted))
        with _MadeStorages() as storages:
            outputs = run_layer(layer, inputs)
        # Clones go to the next layer, so that only this graph keeps the storages alive.
        passed_on = detached(cloned(outputs))
        returned = [_storage(tensor) for tensor in tensors_in(outputs[0])]
        # Scalars, which keep the graphs alive, but not the outputs.
        roots = [tensor.sum() for tensor in tensors_in(outputs) if tensor.requires_grad]
        del outputs
        known = counted | _storage_bytes([*layer.parameters(), *layer.buffers()]).keys()
        kept = {
            ref: nbytes
            for ref, nbytes in (storages.made | received | popped).items()
            if not ref.expired() and ref not in known
        }
        del roots
        are_counted = [ref in counted or ref in kept for ref in returned]
        return sum(kept.values()), passed_on

    return measure_layers(module, sample, device, kept_bytes)


def first_micro_batch(sample: Any, chunks: int) -> Any:
    """The first of ``chunks`` microbatches of ``sample``; a TypeError or ValueError if that cannot
    be cut along dimension 0."""
    tensors, structure = flatten(sample, "the sample")
    rows = micro_batch_sizes(rows_of(tensors, 0, "sample tensor"), chunks)[0]
    return structure.build([tensor[:rows] for tensor in tensors])


Values = tuple[Any, dict[Key, Any]]
"""What a layer takes and the skips that it pops, or what it returns and those that it stashes."""


def run_layer(layer: nn.Module, inputs: list[Values]) -> Values:
    """What ``layer`` makes of the only entry of ``inputs``, which it removes: then nothing but a
    graph keeps those tensors alive."""
    value, popped = inputs.pop()
    with carried(popped) as skips:
        return layer(value), skips


def measure_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device,
    measure: Callable[[nn.Module, list[Values]], tuple[T, Values]],
) -> list[T]:
    """What ``measure`` returns for a copy of each layer and its inputs, as :func:`run_layer` takes
    them; also its outputs, without their graph.

    Layers run in training mode, or in their own modes if ``module`` is in training.
    """
    found = []
    skips: dict[Key, Any] = {}
    with preserved(generators_of([device])), torch.inference_mode(False), torch.enable_grad():
        value = tree_map_only(torch.Tensor, lambda t: t.to(device), detached(sample))
        for layer in layers(module):
            duplicate = copy.deepcopy(layer).to(device)
            if not module.training:
                duplicate.train()
            for parameter in duplicate.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            poppable = [key for _, keys in skips_of(duplicate) for key in keys if key in skips]
            # Clones, because autograd forbids layers to modify leaves in place.
            inputs = [cloned(detached((value, {key: skips.pop(key) for key in poppable})))]
            result, (value, stashed) = measure(duplicate, inputs)
            found.append(result)
            skips |= stashed
    return found


def detached(value: Any) -> Any:
    """``value`` without its graph; its tensors keep their ``requires_grad``."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


cloned = partial(tree_map_only, torch.Tensor, torch.clone)
"""A value with copies of its tensors."""


class _MadeStorages(TorchDispatchMode):
    """The sizes of the storages that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made |= _storage_bytes(result)
        return result


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _storage_bytes(value: Any) -> dict[StorageWeakRef, int]:
    strided = [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]
    return {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in strided}
