"""``nn.MultiheadAttention`` whose heads are sharded over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.full_layer import REMEDY, is_hooked
from pipekernels.tensor_parallel.functional import (
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    shard_spans,
)
from pipekernels.tensor_parallel.linear import RowParallelLinear
from pipekernels.tensor_parallel.sharded import ShardedLayer

_STATE = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


class ParallelMultiheadAttention(ShardedLayer):
    """An ``nn.MultiheadAttention`` that holds a part of the heads: columns of the projections of
    queries, keys and values, rows of the output's. One all-reduce forward, one backward.

    Dropout of attention weights differs between ranks, which hold different heads.

    Args:
        attention: the full layer, the same on every rank. Its parameters are copied.
        comm: the communicator.

    Attributes:
        in_proj_weight: ``[3 * embed_dim / world_size, embed_dim]``.
        in_proj_bias: ``[3 * embed_dim / world_size]`` or ``None``.
        out_proj: a :class:`RowParallelLinear`.
        num_heads: the number of this rank's heads.
        head_dim, dropout, batch_first: as in the full layer.

    Raises:
        TypeError: ``attention`` is of another class, or has hooks or parametrizations.
        ValueError: there are more ranks than heads; or it has ``kdim``, ``vdim``,
            ``add_bias_kv`` or ``add_zero_attn``.
    """

    shard_dims: Mapping[str, int] = {"in_proj_weight": 0, "in_proj_bias": 0}
    parameter_names: ClassVar[tuple[str, ...]] = ("in_proj_weight", "in_proj_bias")

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None

    def __init__(self, attention: nn.MultiheadAttention, comm: Communicator) -> None:
        if (found := type(attention)) is not nn.MultiheadAttention:
            raise TypeError(
                "attention must be an nn.MultiheadAttention, got "
                f"{found.__module__}.{found.__qualname__}"
            )
        names = attention.state_dict().keys()
        if attention.add_zero_attn or names & {"q_proj_weight", "bias_k"}:
            raise ValueError(
                "kdim, vdim, add_bias_kv and add_zero_attn are not supported for sharded "
                "attention; leave this layer as it is"
            )
        if is_hooked(attention) or not names <= set(_STATE):
            raise TypeError(f"attention has hooks or parametrizations; {REMEDY}")
        heads = (attention.num_heads, attention.num_heads)
        super().__init__(comm, (attention.embed_dim,) * 3, heads)
        self.embed_dim = attention.embed_dim
        self.head_dim = attention.head_dim
        self._spans = shard_spans(attention.num_heads, comm.world_size, heads)  # Of heads.
        self._first_head, self.num_heads = self._spans[comm.rank]
        self.dropout = attention.dropout
        self.batch_first = attention.batch_first
        self._qkv_same_embed_dim = True  # nn.TransformerEncoderLayer asks.
        self._adopt({name: getattr(attention, name) for name in self.parameter_names})
        self.out_proj = RowParallelLinear.from_linear(attention.out_proj, comm, heads=heads)
        self.train(attention.training)

    def _new_full(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        heads, has_bias = self.embed_dim // self.head_dim, self.in_proj_bias is not None
        options: dict[str, Any] = {"batch_first": self.batch_first, "device": device}
        return nn.MultiheadAttention(
            self.embed_dim, heads, self.dropout, has_bias, **options, dtype=dtype
        )

    def to_full(self) -> nn.Module:
        full = super().to_full()
        for name, parameter in self.out_proj._full_parameters().items():
            full.get_submodule("out_proj").register_parameter(name, parameter)
        return full

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in ``nn.MultiheadAttention``. A mask with a head dimension has all ranks' heads."""
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, which is missing; pass it")
        is_batched = query.dim() == 3
        q, k, v = self._project(query, key, value)  # Each [batch, heads, length, head_dim].
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        # torch's kernel returns no weights: then they are computed one by one.
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, dropout)
            context = weights @ v
        else:
            context = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = context.transpose(1, 2).flatten(2)  # [batch, length, embed_dim / world_size]
        if is_batched and not self.batch_first:
            output = output.transpose(0, 1)
        output = self.out_proj(output if is_batched else output.squeeze(0))
        # Each rank has the weights of its heads: the mean is a sum over ranks, all are a gather.
        if weights is not None:
            sizes = [held for _, held in self._spans]
            if average_attn_weights:
                weights = reduce_from_ranks(weights.sum(1), self.comm) / sum(sizes)
            else:
                weights = gather_from_ranks(weights.movedim(1, -1), self.comm, sizes)
                weights = weights.movedim(-1, 1)
            weights = weights if is_batched else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of this rank's heads."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        # Self-attention: one product, and one all-reduce of the gradient.
        if query is key and key is value:
            x = copy_to_ranks(query, self.comm)
            projected = list(functional.linear(x, weight, bias).chunk(3, -1))
        else:
            biases = [None] * 3 if bias is None else bias.chunk(3)
            projected = [
                functional.linear(copy_to_ranks(x, self.comm), w, b)
                for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)
            ]
        if query.dim() == 2:
            projected = [y.unsqueeze(0) for y in projected]
        elif not self.batch_first:
            projected = [y.transpose(0, 1) for y in projected]
        heads = (self.num_heads, self.head_dim)
        return [y.unflatten(-1, heads).transpose(1, 2) for y in projected]

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as numbers to add to scores of shape ``[batch, heads, length, length]``."""
        batch = q.shape[0]
        # Numbers may have gradients, as learned biases of positions do.
        attn, padding = (
            mask if mask is None or mask.dtype == torch.bool else copy_to_ranks(mask, self.comm)
            for mask in (attn, padding)
        )
        if attn is not None and attn.dim() == 3:
            attn = attn.unflatten(0, (batch, -1))
            attn = attn.narrow(1, self._first_head, self.num_heads)
        if padding is not None:
            padding = padding.view(batch, 1, 1, -1)
        added = [_as_numbers(mask, q.dtype) for mask in (attn, padding) if mask is not None]
        return sum(added[1:], added[0]) if added else None

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, rank={self.rank}, "
            f"world_size={self.world_size}"
        )


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 and minus infinity for a mask that is true where attention is forbidden."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
