"""Linear layers and experts with weights of integers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.ops.weights import IntegerWeight, Weight
from pipekernels.ops.weights.integers import (
    STEP,
    Integers,
    pack_scale,
    pack_weight,
    pack_zero,
    rounded,
    unpack_scale,
    unpack_weight,
    unpack_zero,
)
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.functional import Heads, shard_spans
from pipekernels.tensor_parallel.linear import (
    LinearLayer,
    RowParallelLinear,
    ShardedLinear,
    forward_column,
    forward_row,
)
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

    def check(self, layer: ShardedLinear | ParallelExperts) -> None:
        """Raise ValueError unless groups divide the input features of each rank."""
        if isinstance(layer, ParallelExperts):
            sizes, shared = [layer.hidden_size], layer.inner_size
            is_cut, heads = not layer.expert_parallel, None
        else:
            sizes, shared, heads = [], layer.in_features, layer.heads
            is_cut = isinstance(layer, RowParallelLinear)
        spans = shard_spans(shared, layer.world_size, heads) if is_cut else [(0, shared)]
        sizes += [size for _, size in spans]
        cut = [size for size in sizes if self.group is not None and size % self.group]
        if cut:
            raise ValueError(
                f"{layer._described()} has {cut[0]} input features on a rank, which groups of "
                f"{self.group} do not divide; {self.remedy}"
            )

    def groups(self, features: int) -> int:
        """Of a row of ``features`` elements."""
        return 1 if self.group is None else features // self.group

    def integers(
        self, layer: Any, name: str, weight: Tensor, comm: Communicator | None
    ) -> Integers:
        """Of ``weight``, ``[..., n, k]``, parameter ``name`` of ``layer``; the ranks of ``comm``
        hold the other parts of ``k``, and call this together if a group is a row."""
        largest = None
        if comm is not None and self.group is None:
            largest = comm.all_reduce(weight.abs().amax(-1, keepdim=True).float(), "max")
        return rounded(weight, self.bits, self.group, largest)


@dataclass(frozen=True)
class StoredFormat(Format):
    """Of integers that are read from a checkpoint.

    Attributes:
        sources: by the name of the layer's parameter, of each field of :class:`Integers` what
            :meth:`ShardedLayer._part` reads it from; removed when it has been read.
        order: see :class:`IntegerLinear`.
        device: of the integers of a layer on the meta device.
    """

    sources: dict[str, dict[str, Any]]
    order: Tensor | None
    device: torch.device | str
    remedy: ClassVar[str] = (
        "use fewer ranks, or pass bits=8 or bits=4, which rounds the weights again"
    )

    def check(self, layer: ShardedLinear | ParallelExperts) -> None:
        if self.group is not None and self.group % STEP:
            raise ValueError(
                f"{layer._described()} has integers in groups of {self.group} in the files, and "
                f"layers take multiples of {STEP}; pass bits=8 or bits=4, which rounds them again"
            )
        is_cut = isinstance(layer, RowParallelLinear) and layer.input_is_parallel
        has_parts = isinstance(layer, ParallelExperts) or (is_cut and layer.world_size > 1)
        if self.order is not None and has_parts:
            raise ValueError(
                f"{layer._described()} has integers in act-order (desc_act) in the files, whose "
                f"groups are of input features of several ranks or experts; {self.remedy}"
            )
        super().check(layer)

    def integers(
        self, layer: Any, name: str, weight: Tensor, comm: Communicator | None
    ) -> Integers:
        device = self.device if weight.is_meta else weight.device
        fields = {kind: layer._part(name, each) for kind, each in self.sources.pop(name).items()}
        return Integers(**{kind: each.to(device) for kind, each in fields.items()})


def _frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


class _IntegerLayer(ShardedLayer):
    """Base of both. Matrices and their scales are kept in the kernel's order, and are in plain
    order where they are gathered and sharded. Scales keep their dtype when the model is converted
    to another one.

    Args:
        layer: in floats. All but its weights is as there.
        scales: of each parameter that becomes integers, the name of its scale.
        cut: those of them whose rows lie on several ranks.
        format: of the integers, whose groups divide the input features of each rank.
    """

    def __init__(
        self, layer: Any, scales: dict[str, str], cut: Sequence[str], format: Format
    ) -> None:
        vars(self).update(vars(copy.copy(layer)), _parameters={})
        self.is_transposed, self.was_transposed = False, layer.is_transposed
        self.scales = scales
        self.zeros = {name: scale.replace("scale", "zero") for name, scale in scales.items()}
        self.format = format
        self.float_dtype: torch.dtype = layer.get_parameter(next(iter(scales))).dtype
        # If a scale is that of a row, all ranks that have a part of it have the same.
        whole = [each[name] for name in cut for each in (scales, self.zeros)]
        self._replicated = [] if format.group else whole
        # Of each matrix, its scale and its zero, n and k of this rank's part.
        self._own: dict[str, tuple[int, int]] = {}
        for name, parameter in layer._parameters.items():
            if name not in scales:
                self.register_parameter(name, parameter)
                continue
            weight = parameter.detach().mT if self.was_transposed else parameter.detach()
            for own in (name, scales[name], self.zeros[name]):
                self._own[own] = weight.shape[-2], weight.shape[-1]
            integers = format.integers(layer, name, weight, self.comm if name in cut else None)
            self.register_parameter(name, _frozen(pack_weight(integers.weight, format.bits)))
            self.register_parameter(scales[name], _frozen(pack_scale(integers.scale)))
            if integers.zero is not None:
                zero = pack_zero(integers.zero, format.bits)
                self.register_parameter(self.zeros[name], _frozen(zero))

    def gather(self, name: str, part: Tensor) -> Tensor:
        if isinstance(self.format, StoredFormat) and name in self._own:
            raise TypeError(
                f"{self._described()} has the integers of a checkpoint, whose files are the full "
                "state; copy these, or call tensor_unparallelize() first, which gives floats"
            )
        return self._gathered(name, part)

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        if name in self.scales:
            part = unpack_weight(part, *self._own[name])
        elif name in self.zeros.values():
            part = unpack_zero(part, self._own[name][0], self.format.bits)
        elif name in self._own:
            part = unpack_scale(part, self._own[name][0])
        return part if name in self._replicated else super().gather(name, part)

    def _part(self, name: str, full: Any) -> Tensor:
        part = full[...] if name in self._replicated else super()._part(name, full)
        if name in self.scales:
            return pack_weight(part, self.format.bits)
        if name in self.zeros.values():
            return pack_zero(part, self.format.bits)
        return pack_scale(part) if name in self._own else part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = {name: self.get_parameter(name).data for name in self.scales.values()}
        super()._apply(fn, recurse)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, scale in scales.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != scale.dtype:
                parameter.data = scale.to(parameter.device)
        return self

    def _full_parameters(self) -> dict[str, nn.Parameter]:
        state = {name: p.detach() for name, p in self._plain_parameters().items()}
        state = {
            name: self._gathered(name, each) if name in self.shard_dims else each.clone()
            for name, each in state.items()
        }
        order = state.pop("order", None)
        for name, scale in self.scales.items():
            integers = Integers(state[name], state.pop(scale), state.pop(self.zeros[name], None))
            weight = integers.floats(self.float_dtype)
            weight = weight if order is None else weight[:, order.argsort()]
            state[name] = weight.mT.contiguous() if self.was_transposed else weight
        return {name: _frozen(value) for name, value in state.items()}

    def _weight_of(self, name: str) -> Weight:
        scale, zero = self._parameters[self.scales[name]], self._parameters.get(self.zeros[name])
        return IntegerWeight(self.get_parameter(name), self._own[name][0], scale, zero)

    def reset_parameters(self) -> None:
        """Raises: weights of integers are made from floats."""
        raise TypeError(f"{self._described()} has weights of integers, which are made from floats")


class IntegerLinear(_IntegerLayer, LinearLayer):
    """A rank's part of a linear layer, with a weight of integers (:func:`quantize_weights`).

    Args:
        layer: a :class:`ColumnParallelLinear` or a :class:`RowParallelLinear`, not invariant. It
            stays as it is; its bias is shared.
        format: of the integers.

    Attributes:
        weight, scale: in the kernel's order; :meth:`full_state_dict` has them in plain order.
        zero: as these; there only if a checkpoint has zeros.
        order: int64 ``[in_features]``, the input feature of each column; None: as they are.
        bias: as that of ``layer``.

    The forward takes and gives the shapes of ``layer``, of any floating dtype.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "scale", "bias")
    order: nn.Parameter | None

    def __init__(self, layer: ShardedLinear, format: Format) -> None:
        self.is_row = isinstance(layer, RowParallelLinear)
        super().__init__(layer, {"weight": "scale"}, ["weight"] if self.is_row else [], format)
        names = ("weight", "scale", "zero", *(() if self.is_row else ("bias",)))
        self.shard_dims = dict.fromkeys(names, int(self.is_row))  # type: ignore[misc]
        order = format.order if isinstance(format, StoredFormat) else None
        own = None if order is None else _frozen(order.to(self.get_parameter("weight").device))
        self.register_parameter("order", own)

    def full_shape(self, name: str) -> tuple[int, ...]:
        if name in ("scale", "zero"):
            return self.out_features, self.format.groups(self.in_features)
        return super().full_shape(name)

    def _operands(self) -> tuple[Weight, Tensor | None]:
        return self._weight_of("weight"), self._parameters["bias"]

    def _own_features(self) -> int:
        return self._own["weight"][1]

    def _check_input(self, x: Tensor, weight: Tensor, features: int) -> None:
        if x.dim() == 0 or x.shape[-1] != features or x.device != weight.device:
            raise ValueError(
                f"{self._described()} on rank {self.rank} of {self.world_size} takes {features} "
                f"features on {weight.device}, got a tensor of shape {tuple(x.shape)} on {x.device}"
            )

    def forward(self, x: Tensor) -> Any:
        """Apply the layer to ``x``."""
        if self.order is not None:
            self._check_input(x, self.order, self.in_features)
            x = x[..., self.order]
        return forward_row(self, x) if self.is_row else forward_column(self, x)


class IntegerExperts(_IntegerLayer, ParallelExperts):
    """A rank's part of stacked experts, with weights of integers (:func:`quantize_weights`).

    Args:
        layer: experts in floats, which stay as they are; their biases are shared.
        format: of the integers.

    Matrices are ``[E, out, in]``, whatever the layout of the full module; each has scales,
    ``gate_up_proj_scale`` and so on, ``[E, out, groups]``. Shapes of the forward: as for
    :class:`ParallelExperts`.
    """

    def __init__(self, layer: ParallelExperts, format: Format) -> None:
        scales = {name: f"{name}_scale" for name in (layer.first, "down_proj")}
        super().__init__(layer, scales, [] if layer.expert_parallel else ["down_proj"], format)
        self._full_shapes = {
            name: (shape[0], *shape[:0:-1]) if self.was_transposed and len(shape) == 3 else shape
            for name, shape in layer._full_shapes.items()
        }
        for name, scale in scales.items():
            experts, n, k = self._full_shapes[name]
            shape = experts, n, format.groups(k)
            self._full_shapes[scale] = self._full_shapes[self.zeros[name]] = shape
        self.shard_dims = self._sharded_dims()  # type: ignore[misc]
        template = copy.copy(layer._template[0])
        template._parameters = self._parameters
        self._template = (template,)

    def _sharded_dims(self) -> dict[str, int]:
        dims = super()._sharded_dims()
        if self.expert_parallel:
            return dims
        own = {self.first: 1, "down_proj": 2}
        return dims | {f"{name}_{kind}": own[name] for name in own for kind in ("scale", "zero")}

    def _layout(self, name: str) -> tuple[Sequence[int], Heads | None]:
        if name in ("down_proj_scale", "down_proj_zero") and not self.expert_parallel:
            return self.full_shape(name)[2:], None
        return super()._layout(name)

    def _weights(self, name: str) -> Weight:
        return self._weight_of(name)
