"""Linear layers and experts with weights of int8."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.ops.weights import Int8Weight, Weight
from pipekernels.ops.weights.int8 import floats_of, int8_of
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.full_layer import full_layer
from pipekernels.tensor_parallel.linear import (
    RowParallelLinear,
    ShardedLinear,
    forward_column,
    forward_row,
)
from pipekernels.tensor_parallel.sharded import ShardedLayer


def _scale(weight: Tensor, comm: Communicator | None) -> Tensor:
    """The scale of each row of ``[..., n, k]``, over the ranks of ``comm``; 1 for rows of zeros."""
    largest = weight.abs().amax(-1).float()
    if comm is not None:
        largest = comm.all_reduce(largest, "max")
    return torch.where(largest > 0, largest / 127, torch.ones_like(largest))


def _frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


class _Int8Layer(ShardedLayer):
    """Base of both. Scales stay float32 when the model is converted to another dtype."""

    float_dtype: torch.dtype
    """The dtype of the full layer's weights."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = {n: p.data for n, p in self._parameters.items() if p is not None and "scale" in n}
        super()._apply(fn, recurse)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, scale in scales.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != scale.dtype:
                parameter.data = scale.to(parameter.device)
        return self

    def reset_parameters(self) -> None:
        """Raises: int8 weights are made from floats."""
        raise TypeError(f"{self._described()} has int8 weights, which are made from floats")


class Int8Linear(_Int8Layer):
    """A rank's part of a linear layer, with a weight of int8 (:func:`quantize_weights`).

    Args:
        layer: a :class:`ColumnParallelLinear` or a :class:`RowParallelLinear`, not invariant. It
            stays as it is; its bias is shared.

    Attributes:
        weight: int8, ``[M / R, K]`` or ``[M, K / R]``.
        scale: float32, ``[M / R]`` or ``[M]``.
        bias: as that of ``layer``.

    The forward takes and gives the shapes of ``layer``, of any floating dtype.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("weight", "scale", "bias")

    in_features: int
    out_features: int
    is_transposed: bool

    def __init__(self, layer: ShardedLinear) -> None:
        vars(self).update(vars(copy.copy(layer)), _parameters={})  # All else is as there.
        self.is_row = isinstance(layer, RowParallelLinear)
        self.shard_dims = {"weight": 1} if self.is_row else dict.fromkeys(self.parameter_names, 0)  # type: ignore[misc]
        parameters = layer._plain_parameters()
        weight = parameters["weight"].detach()
        weight = weight.t() if layer.is_transposed else weight
        scale = _scale(weight, self.comm if self.is_row else None)
        self.float_dtype = weight.dtype
        self.weight = _frozen(int8_of(weight, scale).contiguous())
        self.scale = _frozen(scale)
        self.register_parameter("bias", parameters.get("bias"))

    def full_shape(self, name: str) -> tuple[int, ...]:
        return (self.out_features, self.in_features) if name == "weight" else (self.out_features,)

    def _weight(self) -> Weight:
        return Int8Weight(self.weight, self.scale)

    def _check_input(self, x: Tensor, weight: Tensor, features: int) -> None:
        if x.dim() == 0 or x.shape[-1] != features or x.device != weight.device:
            raise ValueError(
                f"{self._described()} on rank {self.rank} of {self.world_size} takes {features} "
                f"features on {weight.device}, got a tensor of shape {tuple(x.shape)} on {x.device}"
            )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to ``x``."""
        return forward_row(self, x) if self.is_row else forward_column(self, x)

    def to_full(self) -> nn.Module:
        """The full layer in floats, gathered. A collective."""
        full = self.full_state_dict()
        weight = floats_of(full["weight"], full.pop("scale"), self.float_dtype)
        full["weight"] = weight.t().contiguous() if self.is_transposed else weight
        parameters = {name: _frozen(value) for name, value in full.items()}
        return full_layer(parameters, transposed=self.is_transposed).train(self.training)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"is_row={self.is_row}, bias={self.bias is not None}, rank={self.rank}, "
            f"world_size={self.world_size}"
        )


class Int8Experts(_Int8Layer, ParallelExperts):
    """A rank's part of stacked experts, with weights of int8 (:func:`quantize_weights`).

    Args:
        layer: experts in floats, which stay as they are; their biases are shared.

    Matrices are ``[E, out, in]``, whatever the layout of the full module; each has a scale,
    ``gate_up_proj_scale`` and so on, ``[E, out]``. Shapes of the forward: as for
    :class:`ParallelExperts`.
    """

    def __init__(self, layer: ParallelExperts) -> None:
        vars(self).update(vars(copy.copy(layer)), _parameters={})  # All else is as there.
        self.is_transposed, self.was_transposed = False, layer.is_transposed
        self.float_dtype = layer.get_parameter("down_proj").dtype
        # Matrices lie as the kernel for a few rows reads them, each with a scale.
        self._full_shapes = {
            name: (shape[0], *shape[:0:-1]) if self.was_transposed and len(shape) == 3 else shape
            for name, shape in layer._full_shapes.items()
        }
        self._full_shapes |= {
            f"{name}_scale": self._full_shapes[name][:2] for name in (self.first, "down_proj")
        }
        self.shard_dims = self._sharded_dims()  # type: ignore[misc]
        for name, parameter in layer._plain_parameters().items():
            if parameter.dim() != 3:  # A bias.
                self.register_parameter(name, parameter)
                continue
            weight = parameter.detach()
            weight = weight.transpose(1, 2) if self.was_transposed else weight
            # Where the inner dimension is sharded, a scale is that of the rows of all ranks.
            is_cut = name == "down_proj" and not self.expert_parallel
            scale = _scale(weight, self.comm if is_cut else None)
            self.register_parameter(name, _frozen(int8_of(weight, scale).contiguous()))
            self.register_parameter(f"{name}_scale", _frozen(scale.contiguous()))
        template = copy.copy(layer._template[0])
        template._parameters = self._parameters
        self._template = (template,)

    def _sharded_dims(self) -> dict[str, int]:
        dims = super()._sharded_dims()
        return dims if self.expert_parallel else dims | {f"{self.first}_scale": 1}

    def _weights(self, name: str) -> Weight:
        return Int8Weight(self.get_parameter(name), self.get_parameter(f"{name}_scale"))

    def to_full(self) -> nn.Module:
        """The full module in floats, gathered. A collective."""
        state = self.full_state_dict()
        full: nn.Module = copy.copy(self._template[0])
        full._parameters = {}
        for name in (name for name in state if not name.endswith("_scale")):
            value = state[name]
            if value.dim() == 3:
                value = floats_of(value, state[f"{name}_scale"], self.float_dtype)
                value = value.transpose(1, 2).contiguous() if self.was_transposed else value
            full._parameters[name] = _frozen(value)
        return full.train(self.training)
