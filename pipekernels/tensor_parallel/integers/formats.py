"""The formats of integers, and how the matrices of a layer become integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipekernels.ops.weights.integers import STEP, Integers, rounded
from pipekernels.tensor_parallel.functional import shares
from pipekernels.tensor_parallel.integer_matrix import IntegerMatrix
from pipekernels.tensor_parallel.sharded import ShardedLayer


@dataclass(frozen=True)
class Format:
    """Of the integers of a layer, which are rounded from floats.

    Attributes:
        bits: 8 or 4.
        group: elements that share a scale, a multiple of 32; None: all of a row.
    """

    bits: int
    group: int | None
    remedy: ClassVar[str] = "pass a group_size, a multiple of 32, that does, or bits=8 without one"

    def check(self, layer: ShardedLayer) -> None:
        """Raise ValueError unless groups divide the input features of each rank."""
        sizes: list[int] = []
        for name in layer.matrices:
            features = layer.full_shape(name)[_input_dim(layer, name)]
            is_cut = layer.shard_dim(name) == _input_dim(layer, name)
            heads = layer._layout(name)[1]
            sizes += shares(features, layer.world_size, heads) if is_cut else [features]
        cut = [size for size in sizes if self.group is not None and size % self.group]
        if cut:
            raise ValueError(
                f"{layer._described()} has {cut[0]} input features on a rank, which groups of "
                f"{self.group} do not divide; {self.remedy}"
            )

    def integers(self, layer: ShardedLayer, name: str, weight: Tensor, is_cut: bool) -> Integers:
        """Of ``weight``, ``[..., n, k]``, parameter ``name`` of ``layer``; ranks have the other
        parts of ``k`` if it ``is_cut``, and call this together if a group is a row."""
        largest = None
        if is_cut and self.group is None:
            largest = layer.comm.all_reduce(weight.abs().amax(-1, keepdim=True).float(), "max")
        return rounded(weight, self.bits, self.group, largest)


@dataclass(frozen=True)
class StoredFormat(Format):
    """Of integers that are read from a checkpoint.

    Attributes:
        sources: by the name of the layer's parameter, of each field of :class:`Integers` what
            :meth:`ShardedLayer._part` reads it from; removed when it has been read.
        device: of the integers of a layer on the meta device.
    """

    sources: dict[str, dict[str, Any]]
    device: torch.device | str
    remedy: ClassVar[str] = (
        "use fewer ranks, or pass bits=8 or bits=4, which rounds the weights again"
    )

    def check(self, layer: ShardedLayer) -> None:
        if self.group is not None and self.group % STEP:
            raise ValueError(
                f"{layer._described()} has integers in groups of {self.group} in the files, and "
                f"layers take multiples of {STEP}; pass bits=8 or bits=4, which rounds them again"
            )
        super().check(layer)

    def integers(self, layer: ShardedLayer, name: str, weight: Tensor, is_cut: bool) -> Integers:
        device = self.device if weight.is_meta else weight.device
        fields = {kind: layer._part(name, each) for kind, each in self.sources.pop(name).items()}
        return Integers(**{kind: each.to(device) for kind, each in fields.items()})


def _input_dim(layer: ShardedLayer, name: str) -> int:
    """The dimension of the input features in the full parameter ``name``."""
    return len(layer.full_shape(name)) - (2 if layer.is_transposed else 1)


def make_integers(layer: ShardedLayer, format: Format) -> None:
    """Replace the matrices of ``layer`` by integers, their scales and their zeros, without
    gradients. Collective if ranks have parts of the same rows, which share their scales."""
    known: dict[str, IntegerMatrix] = {}
    made: dict[str, Tensor] = {}
    dims, shapes = dict(layer.shard_dims), dict[str, tuple[int, ...]]()
    for name in layer.matrices:
        parameter = layer.get_parameter(name).detach()
        weight = parameter.mT if layer.is_transposed else parameter
        columns, dim = _input_dim(layer, name), layer.shard_dim(name)
        is_cut = dim == columns
        scale = "scale" if name == "weight" else f"{name}_scale"
        zero = scale.replace("scale", "zero")
        *stack, n, k = weight.shape
        shares_rows = is_cut and format.group is None
        matrix = IntegerMatrix(name, scale, zero, n, k, format.bits, shares_rows)
        integers = format.integers(layer, name, weight, is_cut)
        fields = {name: integers.weight, scale: integers.scale, zero: integers.zero}
        made |= {key: matrix.pack(key, field) for key, field in fields.items() if field is not None}
        # The full matrix is ``[..., out, in]``, whatever the layer's is.
        full = layer.full_shape(name)
        last, rows = len(full) - 1, 2 * len(full) - 3 - columns
        groups = full[columns] // (format.group or full[columns])
        known |= dict.fromkeys(fields, matrix)
        dims |= dict.fromkeys(fields, {columns: last, rows: last - 1}.get(dim, dim))
        shapes |= dict.fromkeys(fields, (*full[: len(stack)], full[rows], groups))
        shapes[name] = (*full[: len(stack)], full[rows], full[columns])
    layer.float_dtype = layer.get_parameter(layer.matrices[0]).dtype
    layer.integers, layer.shard_dims = known, dims
    layer._full_shapes |= shapes
    for name, value in made.items():
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
