"""An embedding whose rows, the vocabulary, are sharded over the ranks of a communicator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.data_parallel import check_data_parallel
from pipekernels.tensor_parallel.full_layer import REMEDY, extras_of, is_embedding
from pipekernels.tensor_parallel.functional import own_indices, reduce_from_ranks
from pipekernels.tensor_parallel.invariant.slabs import check_slabs
from pipekernels.tensor_parallel.sharded import ShardedLayer


class VocabParallelEmbedding(ShardedLayer):
    """An embedding that holds a part of the rows. Each rank looks up the rows that it holds, and an
    all-reduce combines them on every rank. After Shoeybi et al., "Megatron-LM" (2019).

    The forward takes integers of any shape, the same on all ranks, and gives
    ``[*shape, embedding_dim]`` on every rank. The backward needs no collective.

    Args:
        num_embeddings: as in the full layer; if not divisible, the first ranks hold one more.
        embedding_dim: as in the full layer.
        padding_idx: index of a row whose gradient is zero, as for ``nn.Embedding``.
        comm: the communicator whose ranks hold the layer.
        invariant, device, dtype: as for :class:`RowParallelLinear`.

    Attributes:
        weight: ``[num_embeddings / world_size, embedding_dim]``.
        rank, world_size: of the communicator.

    Raises:
        TypeError: ``comm`` is not a communicator.
        ValueError: more ranks than ``num_embeddings``; rows that cannot be cut into slabs
            (``invariant``).
        IndexError: an index is outside ``[0, num_embeddings)``; on CUDA an assertion fails on the
            device, as for ``nn.Embedding``.
    """

    shard_dims: Mapping[str, int] = {"weight": 0}
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        comm: Communicator,
        invariant: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = num_embeddings, embedding_dim, padding_idx
        self._shard(nn.Embedding(*sizes, device=device, dtype=dtype), comm, invariant)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Communicator, *, invariant: bool = False
    ) -> VocabParallelEmbedding:
        """This rank's copy of its shard of ``embedding``, with its dtype, device, mode and
        ``requires_grad``.

        Args:
            embedding: the full layer, the same on every rank: an ``nn.Embedding``, or one of
                transformers' that multiply it by a scale (``embed_scale``).
            comm: the communicator.
            invariant: as for the constructor.

        Raises:
            TypeError: ``embedding`` is neither, or has a parametrization or hooks.
            ValueError: it has ``max_norm``, ``scale_grad_by_freq`` or ``sparse``; or as for the
                constructor.
        """
        if not is_embedding(embedding):
            raise TypeError(
                f"embedding must be an nn.Embedding, got {type(embedding).__qualname__}"
            )
        extras = extras_of(embedding)
        if extras is not None:
            raise TypeError(f"embedding has {extras}, which would be lost; {REMEDY}")
        layer = cls.__new__(cls)
        layer._shard(embedding, comm, invariant)
        return layer.train(embedding.training)

    def _shard(self, full: nn.Embedding, comm: Communicator, invariant: bool) -> None:
        super().__init__(comm, invariant=invariant)
        if invariant:
            check_slabs([full.num_embeddings], comm.world_size)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(full, option):
                raise ValueError(
                    f"{option}={getattr(full, option)} is not supported for a sharded embedding; "
                    "leave this embedding as it is, or make it without"
                )
        self.num_embeddings = full.num_embeddings
        self.embedding_dim = full.embedding_dim
        self.padding_idx = full.padding_idx
        scale: Tensor | float | None = getattr(full, "embed_scale", None)
        if isinstance(scale, Tensor):
            if scale.is_meta:  # Not saved; transformers keeps the number as well.
                scale = torch.tensor(full.scalar_embed_scale, dtype=scale.dtype)
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale
        # The full layer without its weight; in a tuple it is not a submodule.
        template = copy.copy(full)
        template._parameters = {"weight": None}
        self._template = (template,)
        self._adopt({"weight": full.weight})

    def to_full(self) -> nn.Module:
        """The full layer, gathered: the inverse of :meth:`from_embedding`. A collective."""
        weight = self.full_state_dict()["weight"]
        full = copy.deepcopy(self._template[0])
        full.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        full._buffers.update(self._buffers)
        return full.train(self.training)

    def _new_full(self, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
        sizes = self.num_embeddings, self.embedding_dim, self.padding_idx
        return nn.Embedding(*sizes, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``: see the class for the shapes."""
        check_data_parallel(self.comm)
        [(start, rows)] = self.spans("weight")
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < start + rows else None
        index, others = own_indices(input, (start, rows), self.num_embeddings)
        found = functional.embedding(index, self.weight, padding)
        found = found.masked_fill(others.unsqueeze(-1), 0)
        if self.invariant:
            found = found + 0.0  # Peers add 0, which makes a 0 of -0; a single rank has none.
        found = reduce_from_ranks(found, self.comm)
        scale = self.embed_scale
        if scale is None:
            return found
        return found * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, "
            f"rank={self.rank}, world_size={self.world_size}"
        )
