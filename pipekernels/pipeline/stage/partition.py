"""Cutting a sequence of layers into contiguous partitions."""

from __future__ import annotations

import operator
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

import torch
from torch import nn

from pipekernels._arguments import integer
from pipekernels.comm import Communicator

Cost = Callable[[int, int, int], float]
"""``cost(p, begin, end)``: that of partition ``p`` with the elements ``begin`` to ``end - 1``.
Non-negative, not less for a later ``end``, in any unit; ``inf`` for a partition not allowed."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module keeps its hooks."""


def solve(costs: Sequence[float], partitions: int) -> list[int]:
    """Lengths of the contiguous partitions of ``costs`` whose largest sum is smallest.

    Exact, by dynamic programming: the linear partition problem, O(partitions x len(costs)^2). Ties
    go to the smallest sum of squared sums, then to the smallest sum of squared lengths.

    Args:
        costs: non-negative cost of each element, in any unit.
        partitions: number of partitions, each of at least one element.

    Raises:
        ValueError: fewer elements than partitions, ``partitions`` is no integer of at least 1, or a
            cost is negative or not finite.
    """
    n = len(costs)
    check_partitions(n, partitions)
    if not all(0 <= cost < inf for cost in costs):
        raise ValueError(f"costs are {list(costs)}; all must be finite, none negative")
    prefix = [0, *accumulate(costs)]

    def cost(p: int, begin: int, end: int) -> float:
        return prefix[end] - prefix[begin]

    limit = _smallest_rest(n, partitions, cost, max)[0][0]

    def unevenness(p: int, begin: int, end: int) -> float:
        if cost(p, begin, end) > limit:
            return inf
        share = cost(p, begin, end) / limit if limit > 0 else 0.0
        return share**2 + 1e-9 * (end - begin) ** 2  # Small: lengths only break ties.

    _, lengths = next(cuts(n, partitions, unevenness, operator.add))
    return lengths


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has forward or backward hooks."""
    return any(getattr(module, name) for name in HOOKS)


def has_collectives(module: nn.Module) -> bool:
    """Whether ``module`` itself has a communicator, or parameters on a mesh (``DTensor``)."""
    return any(
        hasattr(parameter, "device_mesh") for parameter in module._parameters.values()
    ) or any(isinstance(attribute, Communicator) for attribute in vars(module).values())


def check_sequential(module: nn.Module) -> None:
    """Raise a TypeError unless ``module`` is an ``nn.Sequential`` that does nothing but call its
    layers."""
    kind = type(module).__name__
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, not {kind}")
    more = {
        "a forward": type(module).forward is not nn.Sequential.forward or "forward" in vars(module),
        "parameters or buffers": module._parameters or module._buffers,
        "hooks": has_hooks(module),
    }
    for what, there in more.items():
        if there:
            raise TypeError(
                f"the {kind} has {what} of its own, beyond its layers, and the stages would not "
                "have them; make a layer of it, nn.Sequential(module, ...)"
            )


def check_partitions(n: int, partitions: int) -> None:
    """Raise a ValueError unless ``n`` elements can be cut into ``partitions`` non-empty ones."""
    if n < integer("partitions", partitions):
        raise ValueError(
            f"{n} elements cannot be cut into {partitions} partitions; use at most {n}"
        )


def cuts(
    n: int, partitions: int, cost: Cost, combine: Callable[[float, float], float] = max
) -> Iterator[tuple[float, list[int]]]:
    """All cuts of ``n`` elements into ``partitions``, the cheapest first, with their costs.

    Best-first search (A*, Hart, Nilsson and Raphael, 1968) with an exact estimate of the remaining
    cost, so the first cuts are found without visiting the others.

    Args:
        n: number of elements.
        partitions: number of partitions, each of at least one element.
        cost: of one partition. Cuts with an infinite one are left out.
        combine: combines costs of partitions into that of a cut: ``max`` or ``operator.add``.

    Yields:
        (cost, length of each partition).
    """
    rest = _smallest_rest(n, partitions, cost, combine)
    # (lower bound of the cost, partitions still to cut, lengths so far, their cost)
    heap: list[tuple[float, int, list[int], float]] = [(rest[0][0], partitions, [], 0.0)]
    while heap:
        least, left, lengths, so_far = heappop(heap)
        if least == inf:
            return
        if left == 0:
            yield least, lengths
            continue
        p, begin = partitions - left, sum(lengths)
        for end in _ends(n, left, begin):
            cost_so_far = combine(so_far, cost(p, begin, end))
            if cost_so_far == inf:
                break
            least = combine(cost_so_far, rest[p + 1][end])
            if least < inf:
                heappush(heap, (least, left - 1, [*lengths, end - begin], cost_so_far))


def _smallest_rest(
    n: int, partitions: int, cost: Cost, combine: Callable[[float, float], float]
) -> list[list[float]]:
    """``[p][begin]``: the smallest cost of cutting the elements from ``begin`` on into the
    partitions from ``p`` on."""
    rest = [[inf] * (n + 1) for _ in range(partitions + 1)]
    rest[partitions][n] = 0.0
    for p in reversed(range(partitions)):
        left = partitions - p
        for begin in range(p, n - left + 1) if p > 0 else [0]:
            least = inf
            for end in _ends(n, left, begin):
                here = cost(p, begin, end)
                if here >= least:
                    break  # A longer partition costs no less.
                least = min(least, combine(here, rest[p + 1][end]))
            rest[p][begin] = least
    return rest


def _ends(n: int, left: int, begin: int) -> range:
    """Possible ends of the next partition, which begins at ``begin``, with ``left`` to cut."""
    return range(n if left == 1 else begin + 1, n - left + 2)


def balance_by_parameters(module: nn.Sequential, partitions: int) -> list[int]:
    """A balance from parameter counts alone, without a sample or measurements."""
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers(module)]
    return solve([1 + count for count in counts], partitions)


def balance_hint(given: Iterable[str], own: Iterable[str]) -> str | None:
    """How to load a state dict with keys ``given`` into a pipe with keys ``own``, if they name the
    same layers in other stages or in the bare module; None if they do not."""
    given, own = list(given), list(own)
    bare = [_STAGE.sub("", key) for key in given]
    if set(given) == set(own) or set(bare) != {_STAGE.sub("", key) for key in own}:
        return None
    if bare == given:
        return (
            "This is a state dict of the bare module: load it by "
            "pipe.to_sequential().load_state_dict(state_dict)."
        )
    return (
        "This is a state dict of a pipe with another balance. pipe.to_sequential().state_dict() "
        "fits any balance: save that, and load it by "
        "pipe.to_sequential().load_state_dict(state_dict). Or remove the stages from this one's "
        'keys: {key.split(".", 2)[2]: value for key, value in state_dict.items()}.'
    )


_STAGE = re.compile(r"^partitions\.\d+\.")


def layers(module: nn.Sequential) -> list[nn.Module]:
    """The layers of ``module`` in order; one that occurs twice is listed twice."""
    return [layer for layer in module._modules.values() if layer is not None]


def split_module(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[nn.Sequential]:
    """Cut ``module`` by ``balance`` and move each partition to its device. Layer names are kept.

    Raises:
        ValueError: ``balance`` has an entry below 1 or does not add up to the number of layers, or
            partitions on different devices share a parameter, or a module that has buffers; or a
            parameter has no values, as it is on the meta device.
        IndexError: fewer devices than partitions.
    """
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
    partitions = []
    begin = 0
    for length in balance:
        partition = nn.Sequential(OrderedDict(named[begin : begin + length]))
        partition.training = module.training  # Its layers keep their own modes.
        partitions.append(partition)
        begin += length
    _deny_sharing_across_devices(partitions, devices)
    _deny_meta(partitions, devices)
    return [p.to(device) for p, device in zip(partitions, devices, strict=False)]


def _deny_sharing_across_devices(
    partitions: Sequence[nn.Module], devices: Iterable[torch.device]
) -> None:
    home: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=False):
        found: list[tuple[str, object]] = [
            (f"parameter {name!r}", parameter) for name, parameter in partition.named_parameters()
        ]
        # Modules may share a buffer: Module.to() gives each one a copy. Stages may not share one
        # module with buffers: it would be moved away from the first stage.
        found += [
            (f"module {name!r}", module)
            for name, module in partition.named_modules()
            if list(module.buffers(recurse=False))
        ]
        for what, shared in found:
            other = home.setdefault(id(shared), device)
            if other != device:
                raise ValueError(
                    f"{what} is shared by stages on {other} and {device}; put the stages that "
                    "share it on one device"
                )


def _deny_meta(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise a ValueError if a partition has no values that could be copied to its device."""
    for partition, device in zip(partitions, devices, strict=False):
        for name, parameter in partition.named_parameters():
            if parameter.is_meta and device.type != "meta":
                raise ValueError(
                    f"{name!r} is on the meta device, so it has no values that could be copied to "
                    f"{device}; give it memory first (to_empty, then load_state_dict)"
                )


def warn_of_sequence_first(modules: Iterable[nn.Module], chunks: int, batch_dim: int) -> None:
    """Warn if one of ``modules`` says that its batch dimension is 1, and 0 is to be cut."""
    if chunks == 1 or batch_dim != 0:
        return
    for layer in modules:
        if getattr(layer, "batch_first", True) is False:
            warnings.warn(
                f"a {type(layer).__name__} has batch_first=False, so its dimension 0 is time, and "
                "inputs are to be cut into micro-batches along dimension 0; give batch_dim=1 if "
                "the model takes and returns tensors like this layer's",
                UserWarning,
                stacklevel=3,
            )
            return
