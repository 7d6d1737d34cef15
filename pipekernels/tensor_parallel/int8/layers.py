"""Linear layers and experts with weights of int8."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.ops.weights import Int8Weight, Weight
from pipekernels.ops.weights.int8 import floats_of, int8_of
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.linear import (
    LinearLayer,
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
    """Base of both. Scales stay float32 when the model is converted to another dtype.

    Args:
        layer: in floats. All but its weights is as there.
        scales: of each parameter that becomes int8, the name of its scale.
        cut: those of them whose rows lie on several ranks, which then have the same scale.
    """

    def __init__(self, layer: Any, scales: dict[str, str], cut: Sequence[str]) -> None:
        vars(self).update(vars(copy.copy(layer)), _parameters={})
        # Weights lie as the kernel for a few rows reads them.
        self.is_transposed, self.was_transposed = False, layer.is_transposed
        self.scales = scales
        self.float_dtype: torch.dtype = layer.get_parameter(next(iter(scales))).dtype
        for name, parameter in layer._parameters.items():
            if name not in scales:
                self.register_parameter(name, parameter)
                continue
            weight = parameter.detach().mT if self.was_transposed else parameter.detach()
            scale = _scale(weight, self.comm if name in cut else None)
            self.register_parameter(name, _frozen(int8_of(weight, scale).contiguous()))
            self.register_parameter(scales[name], _frozen(scale.contiguous()))

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
        state = self.full_state_dict()
        for name, scale in self.scales.items():
            weight = floats_of(state[name], state.pop(scale), self.float_dtype)
            state[name] = weight.mT.contiguous() if self.was_transposed else weight
        return {name: _frozen(value) for name, value in state.items()}

    def reset_parameters(self) -> None:
        """Raises: int8 weights are made from floats."""
        raise TypeError(f"{self._described()} has int8 weights, which are made from floats")


class Int8Linear(_Int8Layer, LinearLayer):
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

    def __init__(self, layer: ShardedLinear) -> None:
        self.is_row = isinstance(layer, RowParallelLinear)
        super().__init__(layer, {"weight": "scale"}, ["weight"] if self.is_row else [])
        self.shard_dims = {"weight": 1} if self.is_row else dict.fromkeys(self.parameter_names, 0)  # type: ignore[misc]

    def _operands(self) -> tuple[Weight, Tensor | None]:
        parameters: Any = self._parameters
        return Int8Weight(parameters["weight"], parameters["scale"]), parameters["bias"]

    def _check_input(self, x: Tensor, weight: Tensor, features: int) -> None:
        if x.dim() == 0 or x.shape[-1] != features or x.device != weight.device:
            raise ValueError(
                f"{self._described()} on rank {self.rank} of {self.world_size} takes {features} "
                f"features on {weight.device}, got a tensor of shape {tuple(x.shape)} on {x.device}"
            )

    def forward(self, x: Tensor) -> Any:
        """Apply the layer to ``x``."""
        return forward_row(self, x) if self.is_row else forward_column(self, x)


class Int8Experts(_Int8Layer, ParallelExperts):
    """A rank's part of stacked experts, with weights of int8 (:func:`quantize_weights`).

    Args:
        layer: experts in floats, which stay as they are; their biases are shared.

    Matrices are ``[E, out, in]``, whatever the layout of the full module; each has a scale,
    ``gate_up_proj_scale`` and so on, ``[E, out]``. Shapes of the forward: as for
    :class:`ParallelExperts`.
    """

    def __init__(self, layer: ParallelExperts) -> None:
        scales = {name: f"{name}_scale" for name in (layer.first, "down_proj")}
        super().__init__(layer, scales, [] if layer.expert_parallel else ["down_proj"])
        self._full_shapes = {
            name: (shape[0], *shape[:0:-1]) if self.was_transposed and len(shape) == 3 else shape
            for name, shape in layer._full_shapes.items()
        }
        self._full_shapes |= {scale: self._full_shapes[name][:2] for name, scale in scales.items()}
        self.shard_dims = self._sharded_dims()  # type: ignore[misc]
        template = copy.copy(layer._template[0])
        template._parameters = self._parameters
        self._template = (template,)

    def _sharded_dims(self) -> dict[str, int]:
        dims = super()._sharded_dims()
        return dims if self.expert_parallel else dims | {f"{self.first}_scale": 1}

    def _weights(self, name: str) -> Weight:
        return Int8Weight(self.get_parameter(name), self.get_parameter(self.scales[name]))
