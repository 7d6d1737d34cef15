"""Linear layers whose weight is sharded over the ranks of a communicator.

A column-parallel layer shards its output features, a row-parallel one its input features. The first
feeds the second without a collective between them, so a pair (the two layers of an MLP; the
projections into and out of attention) needs one all-reduce forward and one backward. The names
follow Shoeybi et al., "Megatron-LM" (2019), whose weights are the transposes of ours.

On CUDA the products are those of :func:`pipekernels.ops.sharded_gemm`: by Triton where that was
measured to be faster, overlapped with the all-reduce where a gain is predicted, else by cuBLAS. On
CPUs, products of a few rows have a kernel of their own (:mod:`pipekernels.local_ops.skinny_gemm`).

Autograd convention: all ranks compute the same loss
(:mod:`pipekernels.tensor_parallel.functional`). All ranks must run the same forwards and backwards,
in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from pipekernels.comm import Communicator
from pipekernels.device.streams import usable
from pipekernels.local_ops.dispatch import is_observed
from pipekernels.local_ops.sharded_gemm import sharded_gemm
from pipekernels.local_ops.skinny_gemm import skinny_linear
from pipekernels.tensor_parallel.arithmetic.invariant import (
    check_slabs,
    invariant_add_to_slices,
    invariant_column_linear,
    invariant_row_linear,
)
from pipekernels.tensor_parallel.data_parallel import check_data_parallel
from pipekernels.tensor_parallel.full_layer import (
    REMEDY,
    extras_of,
    features_of,
    full_layer,
    linear_classes,
)
from pipekernels.tensor_parallel.functional import (
    copy_to_holders,
    copy_to_ranks,
    gather_from_ranks,
    row_linear,
    row_linear_skinny,
    scatter_to_ranks,
)
from pipekernels.tensor_parallel.partial_gradients import check_gradients, mark_column_output
from pipekernels.tensor_parallel.sharded import ShardedLayer


class ShardedLinear(ShardedLayer):
    """Base of both layers: the full layer is an ``nn.Linear`` or a ``Conv1D`` of transformers."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        comm: Communicator,
        skip_bias_add: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        invariant: bool,
        blocks: Sequence[int] = (),
        copies: int = 1,
    ) -> None:
        super().__init__(comm, blocks, copies, invariant)
        self.in_features = in_features
        self.out_features = out_features
        self.skip_bias_add = skip_bias_add
        self.is_transposed = False  # Weights are [in, out], as those of transformers' Conv1D.
        self._gradients_are_checked = False
        import_module("pipekernels.local_ops.flops")
        device = None if device is None else usable(device)
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._adopt({"weight": full.weight, "bias": full.bias})

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Communicator, **kwargs: Any) -> Any:
        """This rank's shard of ``linear``, with its dtype, device, mode and ``requires_grad``.

        To replace layers inside PyTorch's ``nn.TransformerEncoderLayer``, use
        :func:`~pipekernels.tensor_parallel.tensor_parallelize`: it also disables the encoder's
        fused kernel for evaluation, which would read a shard as the full weight.

        Args:
            linear: the full layer, the same on every rank: an ``nn.Linear``, or a ``Conv1D`` of
                transformers, whose weight the shard keeps transposed. Its parameters are copied,
                not shared.
            comm: the communicator.
            kwargs: the remaining keyword arguments of the class, without ``device`` and ``dtype``.

        Raises:
            TypeError: ``linear`` is neither, is a lazy one without a shape yet, or has a
                parametrization, an adapter, hooks or a forward of its own; or ``device`` or
                ``dtype`` is given.
            ValueError: as for the constructor.
        """
        if not isinstance(linear, linear_classes()):
            raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
        if is_lazy(linear.weight):
            raise TypeError("linear has no in_features yet; call it once, linear(input)")
        for name in ("device", "dtype"):
            if name in kwargs:
                raise TypeError(f"the {name} is that of linear; use linear.to({kwargs[name]!r})")
        extras = extras_of(linear)
        if extras is not None:
            raise TypeError(f"linear has {extras}, which would be lost; {REMEDY}")
        sizes = features_of(linear)
        layer = cls(*sizes, linear.bias is not None, comm=comm, device="meta", **kwargs)
        layer.is_transposed = not isinstance(linear, nn.Linear)
        layer._adopt({"weight": linear.weight, "bias": linear.bias})
        return layer.train(linear.training)

    def to_full(self) -> nn.Module:
        """The full layer, gathered: the inverse of :meth:`from_linear`. A collective that all ranks
        call.

        Raises:
            TypeError: a parametrization or a mask has replaced a parameter.
        """
        parameters = {
            name: nn.Parameter(full, requires_grad=self.get_parameter(name).requires_grad)
            for name, full in self.full_state_dict().items()
        }
        return full_layer(parameters, transposed=self.is_transposed).train(self.training)

    def _initial_parameters(self) -> dict[str, Tensor]:
        """Parameters of the full layer, as a new ``nn.Linear`` has them."""
        sizes, weight = (self.in_features, self.out_features), self.weight
        full = nn.Linear(*sizes, self.bias is not None, device=weight.device, dtype=weight.dtype)
        parameters = {name: parameter.detach() for name, parameter in full.named_parameters()}
        if self.is_transposed:
            parameters["weight"] = parameters["weight"].t()
        return parameters

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, world_size={self.world_size}"
        )

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the parameter ``name`` of the full layer has."""
        if name == "bias":
            return (self.out_features,)
        shape = self.out_features, self.in_features
        return shape[::-1] if self.is_transposed else shape

    def shard_dim(self, name: str) -> int:
        """The sharded dimension of parameter ``name``."""
        dim = self.shard_dims[name]
        return 1 - dim if self.is_transposed and name == "weight" else dim

    def _matrix(self) -> Tensor:
        """The weight, ``[out, in]``."""
        return self.weight.t() if self.is_transposed else self.weight

    def _check_input(self, x: Tensor, features: int) -> None:
        weight = self.weight
        name = self._described()
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes a tensor, got {type(x).__name__}")
        if x.dim() == 0 or x.shape[-1] != features:
            remedy = ""
            if x.dim() > 0 and x.shape[-1] == self.in_features:
                remedy = "; for the full input, construct the layer with input_is_parallel=False"
            raise ValueError(
                f"{name} on rank {self.rank} of {self.world_size} expects {features} features in "
                f"the last dimension (in_features={self.in_features}), got a tensor of shape "
                f"{tuple(x.shape)}{remedy}"
            )
        if x.device != weight.device:
            raise ValueError(
                f"{name} is on {weight.device} but its input on {x.device}; "
                f"move one of them with .to(...)"
            )
        # is_autocast_enabled("meta") raises.
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dtype != weight.dtype and not autocast:
            raise TypeError(
                f"{name} has dtype {weight.dtype} but its input {x.dtype}; "
                f"convert one of them with .to(...), or use torch.autocast"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = super().__deepcopy__(memo)
        clone._gradients_are_checked = False  # Copied parameters have lost their hooks.
        return clone


class RowParallelLinear(ShardedLinear):
    """A linear layer that holds a part of the input features, ``Y = sum over ranks of X_t W_t^T``.

    Args:
        in_features: of the full layer; if not divisible, the first ranks hold one more.
        out_features: of the full layer.
        bias: whether there is one; replicated, and added once, after the reduction.
        comm: the communicator whose ranks hold the layer.
        input_is_parallel: the input holds only this rank's features (the output of a
            :class:`ColumnParallelLinear`); else it is the full, replicated input.
        reduce: ``'all_reduce'``: the full output on every rank. ``'reduce_scatter'``: this rank's
            slice of the output's first dimension, which the world size must divide. Before a
            column-parallel layer or a loss, join the slices of all ``rows`` by
            ``gather_from_ranks(y.movedim(0, -1), comm, rows).movedim(-1, 0)`` from
            :mod:`pipekernels.tensor_parallel.functional`; the backward of ``ops.all_gather`` would
            sum gradients that are already full. ``'none'``: this rank's partial sum, to be reduced
            by the caller; needs ``bias=False`` or ``skip_bias_add=True``.
        skip_bias_add: return ``(output, bias)`` without adding the bias, for a later fused add.
        invariant: results and gradients have the same bits on 1, 2, 4 and 8 ranks
            (:mod:`pipekernels.tensor_parallel.arithmetic`).
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: ``[out_features, in_features / world_size]``, ``nn.Linear``'s layout.
        bias: ``[out_features]`` or ``None``.
        rank, world_size: of the communicator.

    The forward takes ``[..., in_features / world_size]`` and gives ``[..., out_features]``. Its
    backward needs no collective. Exception: with ``'reduce_scatter'`` it all-gathers the output
    gradient and all-reduces the bias gradient, so every rank has the full one: do not sum it again.

    Initialisation equals that of ``nn.Linear`` under the same seed, for any world size; use the
    same seed on all ranks. ``load_state_dict`` takes the state_dict of a full ``nn.Linear`` or of
    this rank's shard. ``copy.deepcopy`` shares the communicator; pickling raises TypeError.
    ``weight_norm``, ``prune`` and other parametrizations see only this rank's shard. A program from
    ``torch.export`` lacks the layer's backward: run it under ``torch.no_grad()``.

    Raises:
        TypeError: ``comm`` is not a communicator; an input has another dtype, without autocast.
        ValueError: more ranks than ``in_features``; an unknown ``reduce``; a bias with
            ``reduce='none'``; an input of the wrong shape or device.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        input_is_parallel: bool = True,
        reduce: str = "all_reduce",
        skip_bias_add: bool = False,
        invariant: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if reduce not in ("all_reduce", "reduce_scatter", "none"):
            raise ValueError(
                f"reduce must be 'all_reduce', 'reduce_scatter' or 'none', got {reduce!r}"
            )
        if reduce == "none" and invariant:
            raise ValueError(
                "reduce='none' returns partial sums, which differ with the number of ranks; "
                "invariant=True needs 'all_reduce' or 'reduce_scatter'"
            )
        if invariant and reduce == "reduce_scatter" and bias and skip_bias_add:
            raise ValueError(
                "reduce='reduce_scatter' with skip_bias_add=True: the gradient of a bias that is "
                "added later depends on the number of ranks; invariant=True needs bias=False, or "
                "skip_bias_add=False"
            )
        if reduce == "none" and bias and not skip_bias_add:
            raise ValueError(
                "reduce='none' returns partial sums, to which a bias would be added once per rank; "
                "pass bias=False, or skip_bias_add=True and add the bias after the reduction"
            )
        super().__init__(
            in_features, out_features, bias, comm, skip_bias_add, device, dtype, invariant
        )
        if invariant:
            check_slabs([in_features], comm.world_size)
        self.input_is_parallel = input_is_parallel
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to ``x``: see the class for the shapes."""
        weight, y = self._matrix(), None
        if not torch.compiler.is_compiling():
            check_data_parallel(self.comm)
            if self.input_is_parallel and self.reduce == "all_reduce" and not self.invariant:
                y = row_linear_skinny(x, weight, self.comm)  # First: checks would take as long.
        if y is None:
            y = self._product(x, weight)
        bias: Tensor | None = self.bias
        if bias is not None and self.reduce == "reduce_scatter" and self.invariant:
            return invariant_add_to_slices(y, bias, self.comm)
        if bias is not None and self.reduce == "reduce_scatter":
            # Each rank adds the bias to its own rows only, so its gradient is a sum over ranks.
            bias = copy_to_ranks(bias, self.comm)
        if self.skip_bias_add:
            return y, bias
        if bias is None:
            return y
        # In place where that is safe: selective checkpointing may keep ``y``, and a tensor subclass
        # is a view of row_linear's result.
        plain = type(y) is Tensor and not is_observed()
        return y.add_(bias) if plain else (y + bias).to(y.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        self._check_input(x, weight.shape[1] if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = scatter_to_ranks(x, self.comm)
        elif x.requires_grad and not (torch.compiler.is_compiling() or self._gradients_are_checked):
            x.register_hook(self._check_gradients)
        if self.reduce == "none":
            return _linear(x, weight)
        if self.invariant:
            scatter = self.reduce == "reduce_scatter"
            return invariant_row_linear(x, weight, self.comm, scatter=scatter)
        return row_linear(x, weight, self.comm, scatter=self.reduce == "reduce_scatter")

    def _check_gradients(self, _: Tensor) -> None:
        if not self._gradients_are_checked:
            check_gradients(self._described())
            self._gradients_are_checked = True

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduce={self.reduce!r}"


class ColumnParallelLinear(ShardedLinear):
    """A linear layer that holds a part of the output features, ``Y_t = X W_t^T + b_t``.

    Args:
        in_features: of the full layer.
        out_features: of the full layer; if not divisible, the first ranks hold one more.
        bias: whether there is one; sharded like the output.
        comm: the communicator whose ranks hold the layer.
        gather_output: return the full output on every rank, instead of this rank's features.
        blocks: sizes of the layers that are fused into this one (``qkv``, ``gate_up_proj``), whose
            sum is ``out_features``: each is sharded by itself, so that this rank's output is a
            smaller fused one. Default: it is one layer.
        copies: how many consecutive ranks hold each shard, as grouped-query attention with fewer
            key heads than ranks needs. Their gradients are summed.
        skip_bias_add: return ``(output, bias)`` without adding the bias, for a later fused add.
        invariant: results and gradients have the same bits on 1, 2, 4 and 8 ranks
            (:mod:`pipekernels.tensor_parallel.arithmetic`).
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: ``[out_features / world_size, in_features]``, ``nn.Linear``'s layout.
        bias: ``[out_features / world_size]`` or ``None``.
        rank, world_size: of the communicator.

    The forward takes the replicated ``[..., in_features]`` and gives
    ``[..., out_features / world_size]``; the backward all-reduces the gradient of the input.

    Initialisation, state_dicts, deepcopy, pickling and export: as for :class:`RowParallelLinear`.

    Raises:
        TypeError: ``comm`` is not a communicator; an input has another dtype, without autocast.
        ValueError: more ranks than ``out_features`` or a block has; blocks or copies that do not
            fit; an input of the wrong shape or device.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        gather_output: bool = False,
        blocks: Sequence[int] | None = None,
        copies: int = 1,
        skip_bias_add: bool = False,
        invariant: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if blocks is not None and (sum(blocks) != out_features or gather_output):
            raise ValueError(
                f"blocks={list(blocks)} must sum up to out_features={out_features}, and there is "
                "no gather_output with them; without blocks the gathered output is the full one"
            )
        if copies > 1 and (blocks is not None or gather_output):
            raise ValueError(
                f"copies={copies} goes with neither blocks nor gather_output; without copies the "
                "gathered output is the full one"
            )
        if invariant and copies > 1:
            raise ValueError(
                f"invariant=True with copies={copies}: the sum of the gradients of several holders "
                "depends on their number; use at most as many ranks as there are key heads"
            )
        sharding = invariant, blocks or (), copies
        super().__init__(
            in_features, out_features, bias, comm, skip_bias_add, device, dtype, *sharding
        )
        if copies > 1 and out_features % (comm.world_size // copies):
            raise ValueError(
                f"{comm.world_size // copies} shards, each with copies={copies}, must be of one "
                f"size, but there are {out_features} features; use fewer ranks"
            )
        if invariant:
            check_slabs(blocks or [out_features], comm.world_size)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Apply the layer to ``x``: see the class for the shapes."""
        weight: Tensor = self._matrix()
        bias: Tensor | None = self.bias
        if not torch.compiler.is_compiling():
            check_data_parallel(self.comm)
            if not (self.skip_bias_add or self.gather_output or self.invariant):
                y = skinny_linear(x, weight, bias)  # First: checks would take as long.
                if y is not None:
                    return y
        self._check_input(x, self.in_features)
        if self.copies > 1:
            weight = copy_to_holders(weight, self.comm, self.copies)
            if bias is not None:
                bias = copy_to_holders(bias, self.comm, self.copies)
        added = None if self.skip_bias_add else bias
        if self.invariant:
            sizes = [size for _, size in self.spans("weight")]
            y = invariant_column_linear(x, weight, added, self.comm, sizes)
        else:
            y = _linear(copy_to_ranks(x, self.comm), weight, added)
        if self.gather_output:
            y = gather_from_ranks(y, self.comm, self.out_features)
        if y.requires_grad and not torch.compiler.is_compiling():
            mark_column_output(y, bias)
        if not self.skip_bias_add:
            return y
        if self.gather_output and bias is not None:
            bias = gather_from_ranks(bias, self.comm, self.out_features)
        return y, bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.is_cuda:
        return sharded_gemm(x, weight, bias)
    y = skinny_linear(x, weight, bias)
    return functional.linear(x, weight, bias) if y is None else y
