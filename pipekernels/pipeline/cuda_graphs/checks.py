"""What captured graphs of a stage depend on, and what prevents a capture."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipekernels._torch_private import TorchDispatchMode, dispatch_modes, have_all_modules_hooks
from pipekernels.device.restoring import entered, restoring
from pipekernels.pipeline.stage.context import default_device
from pipekernels.pipeline.stage.partition import HOOKS
from pipekernels.pipeline.stage.random_state import HookWatch
from pipekernels.pipeline.stage.task import Activation
from pipekernels.pipeline.values.structure import tensors_in

_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})

_affects_graphs: Callable[[Any], bool] = functools.cache(
    lambda kind: kind in _PLAIN or kind is tuple or issubclass(kind, torch.Tensor)
)
"""Whether a captured graph may depend on attributes of a type. Cached: called for every attribute
in every mini-batch."""


class Layout:
    """The addresses of a stage's tensors and the settings of its layers, on which captured graphs
    depend. ``why_not`` is set if the stage, which should be on ``device``, cannot be captured."""

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        self.tensors: list[Any] = []
        self.why_not: str | None = None
        settings: list[Any] = []
        numbers: dict[int, int] = {}
        layers: set[nn.Module] = set()
        stack: list[nn.Module | None] = [stage]  # Faster than stage.modules().
        while stack:
            layer = stack.pop()
            if layer is None or layer in layers:
                continue
            layers.add(layer)
            stack.extend(reversed(layer._modules.values()))
            entries = vars(layer)
            values = [value for value in entries.values() if _affects_graphs(type(value))]
            attributes = [v for v in values if type(v) not in _PLAIN and type(v) is not tuple]
            settings.append(layer)
            settings += [v for v in values if type(v) in _PLAIN or _is_plain_tuple(v)]
            for name in HOOKS:
                if entries.get(name):
                    self.why_not = f"{type(layer).__name__} has hooks"
            for tensor in (*layer._parameters.values(), *layer._buffers.values(), *attributes):
                if tensor is None:
                    self.tensors.append(None)
                    continue
                if type(tensor) not in (torch.Tensor, nn.Parameter):
                    self.why_not = f"{type(layer).__name__} has a {type(tensor).__name__}"
                    continue
                number = numbers.setdefault(id(tensor), len(numbers))
                where = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
                self.tensors.append((number, *where))
                settings.append(tensor.requires_grad)
                if tensor.device != device and tensor.numel():
                    self.why_not = f"{type(layer).__name__} has a tensor on {tensor.device}"
        if have_all_modules_hooks(HOOKS):
            self.why_not = "there are hooks on all modules"
        self.settings = tuple(settings)


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(v) in _PLAIN or _is_plain_tuple(v) for v in value)


def torch_settings() -> tuple[Any, ...]:
    """Settings of the calling thread that affect which kernels layers run."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_cache_enabled(),
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
    )


def unfit(value: Activation, device: torch.device) -> str | None:
    """What in ``value`` cannot be an input or output of a graph; None if all can."""
    foreign = value.structure.foreign()
    if foreign is not None:
        return f"a {foreign}"
    for tensor in value.tensors:
        if tensor.device != device:
            return f"a tensor on {tensor.device}"
        if tensor.layout is not torch.strided:
            return f"a tensor of layout {tensor.layout}"
        if not isinstance(tensor, nn.Parameter) and type(tensor) is not torch.Tensor:
            return f"a {type(tensor).__name__}"
    return None


class _Watch(TorchDispatchMode):
    """Notes operations that a graph on ``device`` cannot replay, or only with the same values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.why_not: str | None = None
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.why_not is None:
            self.why_not = self._why_not(func, tensors_in((args, kwargs)), tensors_in(result))
        return result

    def _why_not(
        self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> str | None:
        name = func.overloadpacket.__name__
        here = [tensor.device == self._device for tensor in given]
        if any(here) and torch.Tag.data_dependent_output in func.tags:
            return f"the CPU reads a tensor ({name})"
        # The shape of an indexing's result depends on values only if the index is a mask.
        masks = [t for t in given[1:] if t.dtype in (torch.bool, torch.uint8)]
        dynamic = torch.Tag.dynamic_output_shape in func.tags and (name != "index" or masks)
        if any(here) and dynamic:
            return f"a shape depends on values ({name})"
        there = [tensor.device != self._device for tensor in made]
        # all(): attention also returns its seed, which is on the CPU outside captures.
        if there and all(there) and torch.Tag.nondeterministic_seeded in func.tags:
            return f"random numbers are drawn on another device ({name})"
        if name in ("_to_copy", "copy_") and len({*here, *(not t for t in there)}) > 1:
            return f"tensors come from another device, or go there ({name})"
        return None


@contextmanager
def watched(stage: nn.Module, device: torch.device) -> Iterator[_Watch]:
    """Watch a pass of ``stage``; afterwards ``why_not`` of the yielded object says what a graph
    could not replay."""
    before = [(layer, vars(layer).copy(), layer._buffers.copy()) for layer in stage.modules()]
    state = random.getstate()
    watch = _Watch(device)

    def leave() -> None:
        if watch in dispatch_modes():
            watch.__exit__(None, None, None)

    with entered(HookWatch({})) as hooks, restoring(leave):
        watch.__enter__()
        yield watch
    if hooks.saw_tensor_hooks:
        watch.why_not = "hooks are put on tensors"
    if random.getstate() != state:
        watch.why_not = "Python's random numbers are drawn"
    for layer, attributes, buffers in before:
        for name in _changed(attributes, vars(layer)) or _changed(buffers, layer._buffers):
            watch.why_not = f"{type(layer).__name__} keeps {name} from one call to the next"


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        name
        for name in {**before, **after}
        if (old := before.get(name, before)) is not (new := after.get(name, before))
        and not (type(old) in _PLAIN and old == new)
    ]
