"""Measures the seconds of each layer of a module.

Each layer runs as a temporary copy, on the outputs of the previous one. So the module and the
caller's sample are not changed, and only one layer at a time has to fit on the device. Forward
hooks run as in training; side effects outside the layer (files, ``random``, NumPy's generator) are
not undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from pipekernels._torch_private import tree_map_only
from pipekernels.pipeline.stage.partition import has_collectives, layers
from pipekernels.pipeline.stage.random_state import generators_of, preserved
from pipekernels.pipeline.stage.skip import Key, carried
from pipekernels.pipeline.values.micro_batch import rows_of
from pipekernels.pipeline.values.structure import flatten, tensors_in

PASSES = 3
"""The fewest times that a layer is timed; the fastest counts."""

T = TypeVar("T")


def measure_seconds(
    module: nn.Sequential, sample: Any, device: torch.device, *, timeout: float
) -> list[float]:
    """For each layer, the seconds of a forward and a backward on ``device``; ``sample`` is the
    argument of the first.

    The smallest time counts, because disturbances only make it longer. Gradients are added to
    existing ones, as from the second micro-batch on.

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
    passes: list[list[float]] = []
    while len(passes) < 1 + PASSES or perf_counter() - begin < timeout:
        passes.append(measure_layers(module, sample, device, _forward_and_backward))
    return list(map(min, zip(*passes[1:], strict=True)))


def _forward_and_backward(run: LayerRun) -> tuple[float, Outputs]:
    """The seconds until all work on the device was done."""

    def now() -> float:
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        return perf_counter()

    begin = now()
    outputs = run.forward()
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return now() - begin, detached(outputs)


def batch_size(sample: Any) -> int:
    """Rows of a mini-batch; a TypeError or ValueError if it cannot be cut along dimension 0."""
    return rows_of(flatten(sample, "the sample")[0], 0, "sample tensor")


def first_rows(sample: Any, rows: int) -> Any:
    """A micro-batch: the first ``rows`` rows of every tensor in ``sample`` that is cut up."""
    tensors, structure = flatten(sample, "the sample")
    return structure.build([tensor[:rows] for tensor in tensors])


Outputs = tuple[Any, dict[Key, Any]]
"""What a layer returns, and the skips that it stashes."""


class LayerRun:
    """One run of ``layer`` on an argument and the skips that it pops, all of them on ``device``."""

    def __init__(
        self, layer: nn.Module, value: Any, popped: dict[Key, Any], device: torch.device
    ) -> None:
        self.layer = layer
        self.device = device
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        # Clones, because autograd forbids layers to modify leaves in place.
        self.value, self.popped = cloned(detached((value, popped)))

    def forward(self) -> Outputs:
        """Run the layer, once, and drop the inputs."""
        value, self.value = self.value, None
        with carried(self.popped) as skips:
            self.popped = {}
            return self.layer(value), skips


def measure_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device,
    measure: Callable[[LayerRun], tuple[T, Outputs]],
) -> list[T]:
    """What ``measure`` returns for a copy of each layer; also its outputs, without their graph.

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
            parts: list[Any] = list(duplicate.modules())
            poppable = [
                key for part in parts if hasattr(part, "poppable") for key in part.poppable()
            ]
            keys = [key for key in poppable if key in skips]
            run = LayerRun(duplicate, value, {key: skips.pop(key) for key in keys}, device)
            result, (value, stashed) = measure(run)
            found.append(result)
            skips |= stashed
    return found


def detached(value: Any) -> Any:
    """``value`` without its graph; its tensors keep their ``requires_grad``."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


def cloned(value: Any) -> Any:
    """``value`` with copies of its tensors."""
    return tree_map_only(torch.Tensor, torch.clone, value)
