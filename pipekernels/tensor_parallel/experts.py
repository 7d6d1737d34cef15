"""Mixtures of experts, sharded over the ranks of a communicator.

Every rank has all tokens and the whole router. It holds either a slice of every expert's inner
features (after Shazeer et al., "Mesh-TensorFlow", 2018), or some of the experts
(expert parallel, after Lepikhin et al., "GShard", 2020). The outputs of all ranks are summed by
one all-reduce, and so are the gradients of the hidden states and of the routing weights.

A rank multiplies each token by the experts to which it is routed:

=================  ========================================  =============================
shapes             inside                                    expert parallel
=================  ========================================  =============================
hidden states      ``[T, H]``                                ``[T, H]``
routing            ``[T, K]``                                ``[T, K]``, other ranks' left out
first product      ``[E, 2 I / R, H]``: ``[T K, 2 I / R]``   ``[E / R, 2 I, H]``: ``[pairs, 2 I]``
second product     ``[E, H, I / R]``: ``[T K, H]``           ``[E / R, H, I]``: ``[pairs, H]``
=================  ========================================  =============================
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.ops.expert_linear import expert_linear, few_rows_expert_linear
from pipekernels.ops.weights import DenseWeight, Weight
from pipekernels.tensor_parallel.data_parallel import check_data_parallel
from pipekernels.tensor_parallel.full_layer import REMEDY, is_hooked
from pipekernels.tensor_parallel.functional import (
    Heads,
    copy_to_ranks,
    reduce_from_ranks,
    shard_spans,
)
from pipekernels.tensor_parallel.sharded import ShardedLayer


class ParallelExperts(ShardedLayer):
    """A rank's part of a module of experts with stacked weights, as transformers has them.

    The forward takes hidden states ``[T, H]``, the chosen experts ``[T, K]`` (integers), and their
    weights ``[T, K]``, all the same on every rank, and gives ``[T, H]`` on every rank. A module
    that takes hidden states only, already sorted by experts and scaled, or that has experts
    without parameters, which pass their input on, runs its own forward on each rank's slices.

    Args:
        experts: the full module (:func:`full_layer.is_experts`): ``gate_up_proj`` (or ``up_proj``)
            ``[E, 2 I, H]`` and ``down_proj`` ``[E, H, I]``, or both transposed, perhaps with biases
            ``[E, 2 I]`` and ``[E, H]``. Gate and up features may be interleaved.
        comm: the communicator.
        expert_parallel: give each rank whole experts, in place of a slice of each.

    Raises:
        TypeError: ``comm`` is not a communicator, or ``experts`` has hooks.
        ValueError: there are more ranks than inner features, or (``expert_parallel``) than
            experts; the module cannot be sharded so.
    """

    parameter_names: ClassVar[tuple[str, ...]] = ("down_proj",)

    def __init__(self, experts: Any, comm: Communicator, *, expert_parallel: bool = False) -> None:
        super().__init__(comm)
        if is_hooked(experts):
            raise TypeError(f"the experts have hooks, which would be lost; {REMEDY}")
        full = {name: p for name, p in experts._parameters.items() if p is not None}
        self.expert_parallel = expert_parallel
        self.is_routed = hasattr(experts, "has_gate")
        self.first = "gate_up_proj" if "gate_up_proj" in full else "up_proj"
        is_flipped = full[self.first].shape[1] == full["down_proj"].shape[2]
        self.is_transposed = experts.is_transposed if self.is_routed else is_flipped
        self.is_concatenated = getattr(experts, "is_concatenated", True)
        if getattr(experts, "has_post_expert_norm", False) or (
            expert_parallel and not self.is_routed
        ):
            raise ValueError(
                f"{type(experts).__name__} normalises each expert's output, or takes hidden states "
                "that are sorted by experts, and cannot be sharded that way; leave it whole"
            )
        self._full_shapes = {name: tuple(parameter.shape) for name, parameter in full.items()}
        self.num_experts, *sizes = full["down_proj"].shape
        self.hidden_size, self.inner_size = sizes[::-1] if self.is_transposed else sizes
        self.shard_dims = self._sharded_dims()
        if self.is_routed:
            self.matrices = (self.first, "down_proj")
        self._adopt(full)
        # The full module, with this rank's parameters; in a tuple it is not a submodule.
        template = copy.copy(experts)
        template._parameters = self._parameters
        self._template = (template,)
        self.train(experts.training)

    def _sharded_dims(self) -> dict[str, int]:
        if self.expert_parallel:
            return dict.fromkeys(self._full_shapes, 0)
        first, second = (2, 1) if self.is_transposed else (1, 2)
        dims = {self.first: first, f"{self.first}_bias": 1, "down_proj": second}
        return {name: dim for name, dim in dims.items() if name in self._full_shapes}

    def _layout(self, name: str) -> tuple[Sequence[int], Heads | None]:
        size = self.full_shape(name)[self.shard_dims[name]]
        if self.expert_parallel or name.startswith("down_proj"):
            return (size,), None
        if self.is_concatenated:
            return (self.inner_size,) * (size // self.inner_size), None
        return (size,), (self.inner_size, self.inner_size)  # A gate stays with its feature.

    def shard(self, name: str, full: Tensor) -> Tensor:
        part = super().shard(name, full)
        if self._keeps_transposed and part.dim() == 3:  # In memory as the kernel reads it.
            part = part.transpose(1, 2).contiguous().transpose(1, 2)
        return part

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """Apply the experts: see the class for the shapes."""
        check_data_parallel(self.comm)
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden_size:
            raise ValueError(
                f"{self._described()} takes hidden states of shape [tokens, {self.hidden_size}], "
                f"got {tuple(hidden_states.shape)}"
            )
        x = copy_to_ranks(hidden_states, self.comm)
        if not self.is_routed:
            routing: tuple[Tensor, ...] = ()
            if top_k_index is not None and top_k_weights is not None:
                own_weights = copy_to_ranks(top_k_weights, self.comm)
                if self.rank > 0:  # Rank 0 alone adds experts without parameters, the last ones.
                    own_weights = own_weights.masked_fill(top_k_index >= self.num_experts, 0)
                routing = top_k_index, own_weights
            own: Tensor = self._template[0].forward(x, *routing)
            return reduce_from_ranks(own, self.comm)
        if top_k_index is None or top_k_weights is None:
            raise TypeError(f"{self._described()} takes hidden states, chosen experts and weights")
        own = self._own_part(x, top_k_index, copy_to_ranks(top_k_weights, self.comm))
        y = reduce_from_ranks(own, self.comm)
        bias = self._parameters.get("down_proj_bias")
        if bias is None or self.expert_parallel:
            return y
        # Once, not on every rank: with the routing weights whose gradient is not summed.
        return y + (top_k_weights.unsqueeze(-1) * bias[top_k_index]).sum(1).to(y.dtype)

    def _own_part(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """This rank's partial sum of the output, ``[T, H]``."""
        parameters, first = self._parameters, self.first
        b1 = parameters.get(f"{first}_bias")
        b2 = parameters.get("down_proj_bias") if self.expert_parallel else None
        tokens, count = chosen.shape
        experts = self.get_parameter(first).shape[0]
        flat = chosen.reshape(-1)
        # ``order`` has the pairs of token and expert, of T K, that this rank computes. Those of a
        # few tokens have their own kernel, which needs no sorting.
        if self.expert_parallel:
            flat = flat - shard_spans(self.num_experts, self.world_size)[self.rank][0]
            order = ((flat >= 0) & (flat < experts)).nonzero().squeeze(1)
            y = self._few(x[order // count], flat[order].unsqueeze(1), b1, b2)
        else:
            y = self._few(x, chosen, b1, b2)
            if y is not None:
                y = y.view(tokens, count, -1) * weights.unsqueeze(-1)
                return y.sum(1).to(x.dtype)
            order = torch.arange(len(flat), device=flat.device)
        if y is None:  # Pairs of one expert one after another, as one product each.
            order = order[torch.argsort(flat[order], stable=True)]
            counts = torch.bincount(flat[order], minlength=experts)
            y = expert_linear(x[order // count], self._weights(first), b1, counts)
            y = expert_linear(self._activated(y), self._weights("down_proj"), b2, counts)
        y = y * weights.reshape(-1, 1)[order]
        pairs = y.new_zeros(tokens * count, y.shape[1]).index_copy(0, order, y)
        return pairs.view(tokens, count, -1).sum(1).to(x.dtype)

    def _few(
        self, x: Tensor, chosen: Tensor, b1: Tensor | None, b2: Tensor | None
    ) -> Tensor | None:
        """Outputs of the experts that rows of ``x`` have chosen, ``[rows * count, H]``, by the
        kernel for few rows; None where it does not apply."""
        y = few_rows_expert_linear(x, self._weights(self.first), b1, chosen)
        if y is not None:
            inner, weights = self._activated(y).flatten(0, 1), self._weights("down_proj")
            y = few_rows_expert_linear(inner, weights, b2, chosen.reshape(-1, 1))
        return None if y is None else y.flatten(0, 1)

    def _weights(self, name: str) -> Weight:
        """``[E, out, in]``."""
        if self.integers:
            return self.integers[name].operand(self._parameters)
        weight: Tensor = self.get_parameter(name)
        return DenseWeight(weight.transpose(1, 2) if self.is_transposed else weight)

    def _activated(self, y: Tensor) -> Tensor:
        """The input of the second product, from the output of the first."""
        template = self._template[0]
        result: Tensor = template._apply_gate(y) if template.has_gate else template.act_fn(y)
        return result

    def reset_parameters(self) -> None:
        """Raises: the model, not this layer, initialises its experts."""
        raise TypeError(
            f"{self._described()} does not know how its model initialises experts; initialise the "
            "model, then shard it"
        )

    def to_full(self) -> nn.Module:
        full: nn.Module = copy.copy(self._template[0])
        full._parameters = dict(self._full_parameters())
        return full.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"inner_size={self.inner_size}, expert_parallel={self.expert_parallel}, "
            f"rank={self.rank}, world_size={self.world_size}"
        )
