"""Cuts a module into partitions, and says what cannot be cut."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from pipekernels._torch_private import module_has_hooks

T = TypeVar("T")


def check_sequential(module: nn.Module) -> None:
    """Raise a TypeError unless ``module`` is an ``nn.Sequential`` that does nothing but call its
    layers."""
    name = type(module).__name__
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be an nn.Sequential, not {name}; of any other model, "
            "tensor_parallelize(model) shards the layers over ranks, and "
            "parallelize_pipeline(model, module_to_device) places its modules on devices"
        )
    if does_more(module, nn.Sequential):
        raise TypeError(
            f"the {name} has its own forward, parameters, buffers or hooks, beyond its layers, and "
            "the stages would not have them; make a layer of it, nn.Sequential(module, ...)"
        )


def does_more(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether ``module`` has a forward, parameters, buffers or hooks that a ``base`` has not."""
    has_forward = type(module).forward is not base.forward or "forward" in vars(module)
    return bool(has_forward or module._parameters or module._buffers or module_has_hooks(module))


def layers(module: nn.Sequential) -> list[nn.Module]:
    """The layers of ``module`` in order; one that occurs twice is listed twice."""
    return [layer for layer in module._modules.values() if layer is not None]


def split_module(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[nn.Sequential]:
    """Cut ``module`` by ``balance`` and move each partition to its device. Layer names are kept.
    A ValueError if ``balance`` does not fit or a partition cannot be moved, an IndexError if there
    are fewer devices."""
    # Not named_children(), which lists a repeated layer only once.
    named = [(name, layer) for name, layer in module._modules.items() if layer is not None]
    if any(length <= 0 for length in balance):
        raise ValueError(f"balance is {list(balance)}; every partition needs at least one layer")
    if sum(balance) != len(named):
        raise ValueError(
            f"balance {list(balance)} adds up to {sum(balance)} layers, but the module has "
            f"{len(named)}; they must be equal"
        )
    if len(devices) < len(balance):
        raise IndexError(
            f"{len(devices)} devices for {len(balance)} partitions; give at least one device per "
            "partition (a device may be repeated)"
        )
    # All are checked before one is moved, so that an error leaves the module where it was.
    partitions = []
    home: dict[int, torch.device] = {}
    rest = iter(named)
    for length, device in zip(balance, devices, strict=False):
        partition = nn.Sequential(OrderedDict(islice(rest, length)))
        partition.training = module.training  # Its layers keep their own modes.
        partitions.append(partition)
        fixed: list[tuple[str, object]] = [
            (f"parameter {name!r}", parameter) for name, parameter in partition.named_parameters()
        ]
        # Modules may share a buffer: Module.to() gives each one a copy. Stages may not share one
        # module with buffers: it would be moved away from the first stage.
        for name, layer in partition.named_modules():
            if list(layer.buffers(recurse=False)):
                fixed.append((f"module {name!r}", layer))
        remedy = "put the stages that share it on one device"
        deny_sharing(fixed, device, home, "stages on", remedy)
    return [p.to(device) for p, device in zip(partitions, devices, strict=False)]


def deny_sharing(
    items: Iterable[tuple[str, object]], owner: T, owners: dict[int, T], sharers: str, remedy: str
) -> None:
    """Raise a ValueError if one of ``items``, with their names, has another owner than ``owner``;
    else add them to ``owners``, by id. ``sharers`` says what shares it, such as "stages on"."""
    for name, item in items:
        first = owners.setdefault(id(item), owner)
        if first != owner:
            raise ValueError(f"{name} is shared by {sharers} {first} and {owner}; {remedy}")
