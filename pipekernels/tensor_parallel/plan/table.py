"""A plan as a table, before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from pipekernels._arguments import check_kind, integer
from pipekernels.tensor_parallel.functional import shard_sizes
from pipekernels.tensor_parallel.plan.kinds import (
    ATTENTION,
    COLUMN,
    EMBEDDING,
    GATHERED,
    PACKED,
    SHARED,
    block_sizes,
)
from pipekernels.tensor_parallel.plan.matching import match
from pipekernels.tensor_parallel.plan.providers import base_of


@dataclass(frozen=True)
class PlannedLayer:
    """Layers of one kind and size whose names differ in numbers only."""

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
    """Of those that rank 0 will hold."""

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
        return "\n".join(lines)


def plan_for(
    model: nn.Module, world_size: int, plan: Mapping[str, str] | Literal["auto"] = "auto"
) -> ModelPlan:
    """What ``tensor_parallelize(model, plan, comm)`` will do on ``world_size`` ranks. The model
    stays as it is; it may be on the meta device.

    Args:
        model: the full model.
        world_size: number of ranks.
        plan: as for :func:`tensor_parallelize`.

    Raises:
        TypeError, ValueError: as :func:`tensor_parallelize`.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("plan", plan, (Mapping, str), "a mapping of patterns to kinds, or 'auto'")
    world_size = integer("world_size", world_size)
    matched = match(base_of(model), plan, world_size)
    full = sum(parameter.numel() for parameter in model.parameters())
    saved: dict[Tensor, int] = {}  # Elements that a rank does without; tied ones count once.
    groups: dict[tuple[Any, ...], list[str]] = {}
    for module, (name, kind) in matched.layers.items():
        own = {key: p for key, p in module.named_parameters() if p.dim() == 2 or "out_" not in key}
        weight = own["in_proj_weight" if kind == ATTENTION else "weight"]
        shape = tuple(weight.shape[::-1] if type(module).__name__ == "Conv1D" else weight.shape)
        try:
            shard = _shard_shape(shape, kind, world_size)
        except ValueError as error:
            raise ValueError(f"{name!r} cannot be made {kind!r}: {error}") from error
        if shard[0] == shape[0]:  # A row-parallel layer has its whole bias.
            own = {key: p for key, p in own.items() if p.dim() == 2}
        for parameter in own.values():
            saved[parameter] = parameter.numel() * (prod(shape) - prod(shard)) // prod(shape)
        groups.setdefault((_without_numbers(name), kind, shape, shard), []).append(name)
    for module, (name, kind) in matched.others.items():
        shape = next((tuple(p.shape) for p in module.parameters(recurse=False)), ())
        groups.setdefault((_without_numbers(name), kind, shape, shape), []).append(name)
    layers = []
    for (_, kind, shape, shard), names in groups.items():
        parts = zip(*(name.split(".") for name in names), strict=True)
        shown = ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
        sent = _sent(kind, shape)
        layers.append(PlannedLayer(shown, len(names), kind, shape, shard, *sent))
    return ModelPlan(world_size, layers, full, full - sum(saved.values()))


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _shard_shape(shape: tuple[int, ...], kind: str, world_size: int) -> tuple[int, ...]:
    """Of the weight, ``[out, in]``, on rank 0."""
    base, _, sizes = kind.partition(":")
    rows, columns = shape
    if base.startswith("row"):
        return rows, shard_sizes(columns, world_size)[0]
    if base == ATTENTION:
        return 3 * shard_sizes(columns, world_size)[0], columns
    if base == PACKED:
        blocks = block_sizes(kind, rows)
        return sum(shard_sizes(block, world_size)[0] for block in blocks), columns
    shards = world_size // int(sizes) if base == SHARED else world_size
    return shard_sizes(rows, shards)[0], columns


def _sent(kind: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """In the forward and in the backward."""
    base = kind.partition(":")[0]
    if base in (COLUMN, PACKED, SHARED):
        return "", f"all-reduce {shape[1]}"
    if base == GATHERED:
        return f"all-gather {shape[0]}", f"all-reduce {shape[1]}"
    if base == EMBEDDING:
        return f"all-reduce {shape[1]}", ""
    if base == ATTENTION:
        return f"all-reduce {shape[1]}", f"all-reduce {shape[1]}"
    if base == "row":
        return f"all-reduce {shape[0]}", ""
    if base == "row_split_input":
        return f"all-reduce {shape[0]}", f"all-gather {shape[1]}"
    return "", ""
