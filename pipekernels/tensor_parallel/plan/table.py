"""Shows a plan as a table before anything is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from pipekernels._arguments import integer
from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.full_layer import is_experts
from pipekernels.tensor_parallel.plan.kinds import HookKind, LayerKind
from pipekernels.tensor_parallel.plan.parallelize import shard_of
from pipekernels.tensor_parallel.plan.sharding_plan import base_of, resolve, without_numbers


@dataclass(frozen=True)
class PlannedLayer:
    """Layers of one kind and size whose names differ only in numbers."""

    name: str
    """With ``*`` in place of numbers that differ."""
    count: int
    kind: str
    shape: tuple[int, ...]
    """Shape of the full weight."""
    shard: tuple[int, ...]
    """Shape of rank 0's weight, the largest."""
    forward: str
    """What the ranks exchange per layer, the numbers of elements per token; empty if nothing."""
    backward: str


@dataclass(frozen=True)
class ModelPlan:
    """What :func:`tensor_parallelize` will do to a model; ``print`` it."""

    world_size: int
    layers: list[PlannedLayer]
    full_parameters: int
    """Number of elements of the model's parameters."""
    rank_parameters: int
    """How many of them rank 0 will hold."""
    rank_bytes: int
    """Bytes of those."""
    token_bytes: int
    """How many of these bytes a forward of one token reads. Of experts that are routed to, those
    are the chosen ones', as many on each rank; of an embedding, nothing to speak of."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "count", "kind", "weight", "of a rank", "forward", "backward")
        ]
        for layer in self.layers:
            shapes = ("x".join(map(str, shape)) for shape in (layer.shape, layer.shard))
            sent = layer.forward or "-", layer.backward or "-"
            rows.append((layer.name, str(layer.count), layer.kind, *shapes, *sent))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.append(
            f"{self.rank_parameters:,} of {self.full_parameters:,} parameters on each of "
            f"{self.world_size} ranks; sent: elements per token and layer"
        )
        lines.append(
            f"{self.rank_bytes:,} bytes on each rank, of which one token reads {self.token_bytes:,}"
        )
        return "\n".join(lines)


def plan_for(
    model: nn.Module, world_size: int, plan: Mapping[str, str] | Literal["auto"] = "auto"
) -> ModelPlan:
    """What ``tensor_parallelize(model, plan, comm)`` will do on ``world_size`` ranks. The model is
    not changed, and may be on the meta device.

    Args:
        model: the full model.
        world_size: number of ranks.
        plan: as for :func:`tensor_parallelize`.

    Raises:
        TypeError, ValueError: as :func:`tensor_parallelize`.
    """
    world_size = integer("world_size", world_size)
    base = base_of(model)
    sharding_plan = resolve(base, plan, world_size)
    layers = sharding_plan.modules(base, LayerKind)
    elements = {parameter: parameter.numel() for parameter in model.parameters()}
    # Shards of copies without memory, which take their parameters from ``memo``.
    memo = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in elements}
    held = dict(elements)  # Of them, by rank 0.
    groups: dict[tuple[Any, ...], list[str]] = {}
    for module, (name, kind) in layers.items():
        copied = copy.deepcopy(module, {**memo})
        shard = shard_of(copied, name, kind, _FirstRank(world_size), invariant=False)
        held |= {p: shard.get_parameter(key).numel() for key, p in module.named_parameters()}
        key = without_numbers(name), kind, *_weight_shapes(shard)
        groups.setdefault(key, []).append(name)
    for module, (name, hook) in sharding_plan.modules(base, HookKind).items():
        own = next((tuple(p.shape) for p in module.parameters(recurse=False)), ())
        groups.setdefault((without_numbers(name), hook, own, own), []).append(name)
    # A row names the numbers that all its layers have in common.
    rows = []
    for (_, kind, shape, shard), names in groups.items():
        parts = zip(*(name.split(".") for name in names), strict=True)
        shown = ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
        sent = kind.sent if isinstance(kind, LayerKind) else ("", "")
        forward, backward = (text.format(*shape) for text in sent)
        rows.append(PlannedLayer(shown, len(names), kind.word, shape, shard, forward, backward))
    held_bytes = {p: count * p.element_size() for p, count in held.items()}
    # A token reads no experts but those that it is routed to, and one row of an embedding.
    unread = 0.0
    for module, (name, _) in layers.items():
        if is_experts(module):
            idle = 1 - _chosen_share(base.get_submodule(name.rpartition(".")[0]), module)
            unread += idle * sum(held_bytes[p] for p in module.parameters())
    for weight in _only_embedded(model):
        unread += held_bytes[weight]
    total, full = sum(held_bytes.values()), sum(elements.values())
    return ModelPlan(world_size, rows, full, sum(held.values()), total, total - round(unread))


class _FirstRank(Communicator):
    """Rank 0 of ranks that there are not: shards are made for it, and never run."""

    def __init__(self, world_size: int) -> None:
        self._rank, self._world_size = 0, world_size


def _weight_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    """Of the weight, in full and on this rank: ``[out, in]``, ``[experts, out, in]``."""
    name = layer.parameter_names[0]
    for shape in (layer.full_shape(name), tuple(layer.get_parameter(name).shape)):
        is_transposed = getattr(layer, "is_transposed", False)
        yield (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape


def _chosen_share(block: nn.Module, experts: nn.Module) -> float:
    """The share of its experts to which a token is routed; 1 if its router does not say."""
    count = next(p.shape[0] for p in experts.parameters())
    choices = (getattr(module, "top_k", None) for module in block.modules())
    return next((choice / count for choice in choices if isinstance(choice, int)), 1.0)


def _only_embedded(model: nn.Module) -> set[nn.Parameter]:
    """Weights of embeddings that no other layer uses."""
    embedded, others = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        users = embedded if isinstance(module, nn.Embedding) else others
        users.update(module.parameters(recurse=False))
    return embedded - others
