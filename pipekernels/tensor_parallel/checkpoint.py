"""State dicts for ``torch.distributed.checkpoint`` that say which part of a tensor a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel.sharded import ShardKey, sharded_parameters


def checkpoint_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of ``module`` for ``torch.distributed.checkpoint``, with the place of each
    shard in the full tensor: :doc:`/guides/transformers` has an example.

    Nothing is gathered. The tensors share the model's memory, so ``dcp.load`` fills the model.
    Shards are tensors of the full shape without its memory, which only ``dcp.save`` and
    ``dcp.load`` understand.

    Raises:
        TypeError: a sharded layer has a parametrization or a mask.
    """
    sharded = sharded_parameters(module)
    state = module.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, Tensor):
            known = sharded.get(value)
            state[key] = value.detach() if known is None else _described(value.detach(), known)
    return state


class _DescribedShard(Tensor):
    """Implements torch's interface of tensors that are described by chunks."""

    _chunks: dict[torch.Size, Tensor]
    """This rank's parts by their offsets in the full tensor."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        # Imported here, as programs without checkpoints do not need it.
        from torch.distributed.checkpoint import metadata, planner

        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=metadata.ChunkStorageMetadata(offsets, chunk.shape),
                    properties=metadata.TensorProperties.create_from_tensor(chunk),
                    size=self.shape,
                ),
            )
            for offsets, chunk in self._chunks.items()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(at, chunk.shape) for at, chunk in self._chunks.items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._chunks[torch.Size(index.offset)]


def _described(shard: Tensor, key: ShardKey) -> _DescribedShard:
    layer, name = key
    shape, dim = layer.full_shape(name), layer.shard_dim(name)
    # One element seen as many: dcp.load would give memory to tensors on the meta device.
    whole = shard.new_empty(()).expand(shape)
    described: _DescribedShard = whole.as_subclass(_DescribedShard)
    spans = layer.spans(name)
    chunks = shard.split([size for _, size in spans], dim)
    described._chunks = {
        torch.Size(start if d == dim else 0 for d in range(len(shape))): chunk
        for (start, _), chunk in zip(spans, chunks, strict=True)
    }
    return described
