"""Linear layers whose weight is sharded over the ranks of a communicator.

Problem: one rank cannot hold the weight, or reads it too slowly. Solution, after Shoeybi et al.,
"Megatron-LM" (2019): a column-parallel layer shards the output features, a row-parallel one the
input features. The first feeds the second without a collective between them, so a pair (the layers
of an MLP; the projections into and out of attention) needs one all-reduce in each direction.
Assumption: all ranks compute the same loss (:mod:`pipekernels.tensor_parallel.functional`), and run
the same forwards and backwards in the same order.

With R ranks, N rows, K input and M output features (weights have the layout of ``nn.Linear``):

============  ===========================  ===============================
tensor        ``ColumnParallelLinear``     ``RowParallelLinear``
============  ===========================  ===============================
x             ``[N, K]``, replicated       ``[N, K / R]``
weight        ``[M / R, K]``               ``[M, K / R]``
bias          ``[M / R]``                  ``[M]``, replicated
x @ weight.T  ``[N, M / R]``               ``[N, M]``, a partial sum
forward       no collective                all-reduce of ``[N, M]``
y             ``[N, M / R]``               ``[N, M]``, replicated
grad of x     all-reduce of ``[N, K]``     ``[N, K / R]``, no collective
============  ===========================  ===============================

``gather_output=True`` all-gathers y to ``[N, M]``, ``input_is_parallel=False`` takes the replicated
``[N, K]``, and ``reduce="reduce_scatter"`` leaves ``[N / R, M]`` on each rank. The weights of
``pipekernels.ops.weights`` compute the products, and
:mod:`pipekernels.tensor_parallel.invariant` the products of invariant layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipekernels._torch_private import active_ddp, dispatch_mode_count
from pipekernels.comm import Communicator
from pipekernels.ops.weights import DenseWeight, Weight
from pipekernels.tensor_parallel.data_parallel import check_data_parallel
from pipekernels.tensor_parallel.full_layer import (
    REMEDY,
    extras_of,
    features_of,
    linear_classes,
)
from pipekernels.tensor_parallel.functional import (
    Heads,
    check_heads,
    column_linear,
    copy_to_holders,
    copy_to_ranks,
    gather_from_ranks,
    scatter_to_ranks,
    summed_linear,
)
from pipekernels.tensor_parallel.invariant.arithmetic import (
    check_invariant_row,
    invariant_column_linear,
    invariant_row_linear,
)
from pipekernels.tensor_parallel.invariant.slabs import check_slabs
from pipekernels.tensor_parallel.sharded import ShardedLayer


class ShardedLinear(ShardedLayer):
    """Base of both layers: the full layer is an ``nn.Linear`` or a ``Conv1D`` of transformers."""

    matrices = ("weight",)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, full: nn.Linear, skip_bias_add: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_features = full.in_features
        self.out_features = full.out_features
        self.skip_bias_add = skip_bias_add
        self._adopt({"weight": full.weight, "bias": full.bias})

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Communicator, **kwargs: Any) -> Any:
        """This rank's copy of its shard of ``linear``, with its dtype, device, mode and
        ``requires_grad``.

        Args:
            linear: the full layer, the same on every rank: an ``nn.Linear``, or a ``Conv1D`` of
                transformers, whose weight the shard keeps transposed.
            comm: the communicator.
            kwargs: the remaining keyword arguments of the class, without ``device`` and ``dtype``.

        Raises:
            TypeError: ``linear`` is neither, is a lazy one without a shape yet, or has a
                parametrization, an adapter, hooks or an overridden forward.
        """
        if not isinstance(linear, linear_classes()):
            raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
        if is_lazy(linear.weight):
            raise TypeError("linear has no in_features yet; call it once, linear(input)")
        extras = extras_of(linear)
        if extras is not None:
            raise TypeError(f"linear has {extras}, which would be lost; {REMEDY}")
        construct: Any = cls
        kwargs = dict(comm=comm, device="meta", dtype=linear.weight.dtype, **kwargs)
        layer = construct(*features_of(linear), linear.bias is not None, **kwargs)
        layer.is_transposed = not isinstance(linear, nn.Linear)
        layer._adopt({"weight": linear.weight, "bias": linear.bias})
        return layer.train(linear.training)

    def _new_full(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        sizes, has_bias = (self.in_features, self.out_features), self.bias is not None
        if not self.is_transposed:
            return nn.Linear(*sizes, has_bias, device, dtype)
        with device:
            full: nn.Module = linear_classes()[1](*sizes[::-1]).to(dtype)
        if not has_bias:
            full.register_parameter("bias", None)
        return full

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, world_size={self.world_size}"
        )

    def shard_dim(self, name: str) -> int:
        dim = self.shard_dims[name]
        return 1 - dim if name == "weight" and self._keeps_transposed else dim

    def _operands(self) -> tuple[Weight, Tensor | None]:
        if not torch.compiler.is_compiling() and active_ddp() is not None:
            check_data_parallel(self.comm)
        own: Any = self._parameters
        if self.integers:
            return self.integers["weight"].operand(own), own["bias"]
        if "weight" not in own or "bias" not in own:  # Computed by a parametrization or a mask.
            own = {"weight": self.weight, "bias": self.bias}
        weight = own["weight"]
        return DenseWeight(weight.t() if self.is_transposed else weight), own["bias"]

    def _check_input(self, x: Tensor, weight: Weight, features: int) -> None:
        """The kernels rely on it; torch checks the dtype."""
        if x.shape[-1:] != (features,):
            remedy = ""
            if x.shape[-1:] == (self.in_features,):
                remedy = "; for the full input, construct the layer with input_is_parallel=False"
            raise ValueError(
                f"{self._described()} on rank {self.rank} of {self.world_size} expects {features} "
                f"features in the last dimension (in_features={self.in_features}), got a tensor of "
                f"shape {tuple(x.shape)}{remedy}"
            )
        if x.device != weight.tensor.device:
            raise ValueError(
                f"{self._described()} is on {weight.tensor.device} but its input on {x.device}; "
                f"move one of them with .to(...)"
            )


class RowParallelLinear(ShardedLinear):
    """A linear layer that holds a part of the input features, ``Y = sum over ranks of X_t W_t^T``.

    The forward takes ``[..., in_features / world_size]`` and gives ``[..., out_features]``. Its
    backward needs no collective. Exception: with ``'reduce_scatter'`` it all-gathers the output
    gradient and all-reduces the bias gradient, so every rank has the full one: do not sum it again.
    :doc:`/guides/tensor_parallel` has initialisation, state dicts and copies.

    Args:
        in_features: as in the full layer; if not divisible, the first ranks hold one more.
        out_features: as in the full layer.
        bias: whether there is one. It is replicated, and added once, after the reduction.
        comm: the communicator whose ranks hold the layer.
        input_is_parallel: the input holds only this rank's features; otherwise it is replicated.
        heads: of attention, see :class:`ColumnParallelLinear`.
        reduce: ``'all_reduce'``: the full output on every rank. ``'reduce_scatter'``: this rank's
            slice of the output's first dimension, which the world size must divide. ``'none'``:
            this rank's partial sum, to be reduced by the caller; needs ``bias=False`` or
            ``skip_bias_add=True``.
        skip_bias_add: return ``(output, bias)`` without adding the bias, for a later fused add.
        invariant: the same bits on 1, 2, 4 and 8 ranks (:doc:`/guides/invariance`).
        device, dtype: of the parameters.

    Attributes:
        weight: ``[out_features, in_features / world_size]``, ``nn.Linear``'s layout.
        bias: ``[out_features]`` or ``None``.
        rank, world_size: of the communicator.

    Raises:
        TypeError: ``comm`` is not a communicator.
        ValueError: more ranks than ``in_features`` or heads; heads that do not fit; an unknown
            ``reduce``; a bias with ``reduce='none'``; an input of the wrong shape or device.
    """

    shard_dims: Mapping[str, int] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        input_is_parallel: bool = True,
        heads: Heads | None = None,
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
        if reduce == "none" and bias and not skip_bias_add:
            raise ValueError(
                "reduce='none' returns partial sums, to which a bias would be added once per rank; "
                "pass bias=False, or skip_bias_add=True and add the bias after the reduction"
            )
        if heads is not None and not input_is_parallel:
            raise ValueError(f"heads={heads} goes with input_is_parallel=True only")
        full = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(full, skip_bias_add, comm, heads=heads, invariant=invariant)
        check_heads(heads, comm.world_size)
        if invariant:
            check_invariant_row(in_features, comm, reduce, bias=bias, heads=heads)
        [(_, self._features)] = self.spans("weight")
        self.input_is_parallel = input_is_parallel
        self.reduce = reduce

    def forward(self, x: Tensor) -> Any:
        """Apply the layer to ``x``: see the class for the shapes."""
        weight, bias = self._operands()
        comm, scatter = self.comm, self.reduce == "reduce_scatter"
        self._check_input(x, weight, self._features if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = scatter_to_ranks(x, comm)
        y: Tensor
        if self.reduce == "none":
            y = column_linear(x, weight, None, None)
        elif self.invariant:
            y = invariant_row_linear(x, weight.tensor, comm, scatter=scatter)
        else:
            y = summed_linear(x, weight, comm, scatter)
        if bias is not None and scatter:
            bias = copy_to_ranks(bias, comm)  # Its gradient is over all rows.
        if self.skip_bias_add:
            return y, bias
        if bias is None:
            return y
        # Selective checkpointing, a dispatch mode, may keep y; a subclass is a view of the product.
        is_plain = type(y) is Tensor and not torch.compiler.is_compiling()
        if is_plain and dispatch_mode_count() == 0:
            return y.add_(bias)
        return (y + bias).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduce={self.reduce!r}"


class ColumnParallelLinear(ShardedLinear):
    """A linear layer that holds a part of the output features, ``Y_t = X W_t^T + b_t``.

    The forward takes the replicated ``[..., in_features]`` and gives
    ``[..., out_features / world_size]``; the backward all-reduces the gradient of the input.

    Args:
        in_features: as in the full layer.
        out_features: as in the full layer; if not divisible, the first ranks hold one more.
        bias: whether there is one. It is sharded like the output.
        comm: the communicator whose ranks hold the layer.
        gather_output: return the full output on every rank, instead of this rank's features.
        blocks: sizes of the layers that are fused into this one (``qkv``, ``gate_up_proj``), whose
            sum is ``out_features``: each is sharded by itself.
        heads: the number of attention heads to which the features belong, and of key heads:
            ``(14, 2)`` for queries, ``(2, 2)`` for keys and values. Ranks hold whole heads; with
            fewer heads than ranks, several hold the same (:doc:`/guides/tensor_parallel`).
        skip_bias_add, invariant, device, dtype: as for :class:`RowParallelLinear`.

    Attributes:
        weight: ``[out_features / world_size, in_features]``, ``nn.Linear``'s layout.
        bias: ``[out_features / world_size]`` or ``None``.
        rank, world_size: of the communicator.

    Raises:
        TypeError: ``comm`` is not a communicator.
        ValueError: more ranks than ``out_features`` or a block has; blocks or heads that do not
            fit; an input of the wrong shape or device.
    """

    shard_dims: Mapping[str, int] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: Communicator,
        gather_output: bool = False,
        blocks: Sequence[int] | None = None,
        heads: Heads | None = None,
        skip_bias_add: bool = False,
        invariant: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if blocks is not None and (sum(blocks) != out_features or gather_output):
            raise ValueError(
                f"blocks={list(blocks)} must sum up to out_features={out_features}, and go without "
                "gather_output"
            )
        if heads is not None and gather_output:
            raise ValueError(f"heads={heads} goes with gather_output=False only")
        full = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(full, skip_bias_add, comm, blocks or (), heads, invariant)
        if invariant:
            check_slabs(blocks or [out_features], comm.world_size, heads)
        self.gather_output = gather_output
        self.is_shared = len(set(self.shards)) < comm.world_size
        self._own_blocks = [size for _, size in self.spans("weight")]

    def forward(self, x: Tensor) -> Any:
        """Apply the layer to ``x``: see the class for the shapes."""
        comm = self.comm
        weight, bias = self._operands()
        self._check_input(x, weight, self.in_features)
        # Ranks that hold the same heads sum the gradients of their shard.
        if self.is_shared:
            weight.tensor = copy_to_holders(weight.tensor, comm, self.shards)
            if bias is not None:
                bias = copy_to_holders(bias, comm, self.shards)
        added = None if self.skip_bias_add else bias
        y: Tensor
        if self.invariant:
            y = invariant_column_linear(x, weight.tensor, added, comm, self._own_blocks)
        else:
            y = column_linear(x, weight, added, comm)
        if self.gather_output:
            y = gather_from_ranks(y, comm, self.out_features)
        if not self.skip_bias_add:
            return y
        if self.gather_output and bias is not None:
            bias = gather_from_ranks(bias, comm, self.out_features)
        return y, bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"
