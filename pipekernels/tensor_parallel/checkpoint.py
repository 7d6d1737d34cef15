"""State dicts for ``torch.distributed.checkpoint`` that say which part of a tensor a rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel.sharded import ShardKey, sharded_parameters
from pipekernels.tensor_parallel.state import check_sharded_alike


def checkpoint_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of ``module`` for ``torch.distributed.checkpoint``, with the place of each
    shard in the full tensor::

        dcp.save(checkpoint_state_dict(model), checkpoint_id=folder)
        dcp.load(checkpoint_state_dict(model), checkpoint_id=folder)  # on any number of ranks

    Nothing is gathered. All ranks save and load, each its shards. The memory is the model's own, so
    after ``load`` the model has the values. A model without shards saves and loads the same files:
    ``dcp.load(model.state_dict(), checkpoint_id=folder)``.

    Args:
        module: the model; sharded layers may be at any depth.

    Returns:
        The keys of ``module.state_dict()``. Shards are tensors of the full shape without its
        memory, which only ``dcp.save`` and ``dcp.load`` understand; the others are the model's.

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


class OptimizerCheckpoint:
    """The state of an optimizer for ``torch.distributed.checkpoint``, with the place of each shard
    in the full tensor::

        state = {"optimizer": OptimizerCheckpoint(model, optimizer)}
        dcp.save(state | {"model": checkpoint_state_dict(model)}, checkpoint_id=folder)

    Torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` of
    ``torch.distributed.checkpoint.state_dict`` save and load the same files for a model without
    shards.

    Args:
        module: the model; sharded layers may be at any depth.
        optimizer: of parameters of ``module``. One without state gets it, as torch does that: by a
            step of size zero.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        """What ``dcp`` saves, or loads into: the optimizer's memory.

        Raises:
            TypeError: state of a sharded parameter has another shape, as in ``Adafactor``; or its
                layer has a parametrization or a mask.
            ValueError: a wrapper has renamed the parameters.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        state: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        sharded = sharded_parameters(self._module)
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        for name, entries in state["state"].items():
            if name not in parameters:
                raise ValueError(
                    f"torch knows the parameter {name!r} of a wrapped model by another name; pass "
                    "the model itself, without DistributedDataParallel or torch.compile"
                )
            known = sharded.get(parameters[name])
            # A copy: torch returns the optimizer's own dict, which goes on holding shards.
            state["state"][name] = described = dict(entries)
            for key, value in entries.items():
                if known is not None and isinstance(value, Tensor) and value.dim() > 0:
                    check_sharded_alike(key, value, parameters[name])
                    described[key] = _described(value, known)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by ``dcp.load`` with what :meth:`state_dict` has returned, with other values."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        state = {
            name: {
                key: value.shard if isinstance(value, _DescribedShard) else value
                for key, value in entries.items()
            }
            for name, entries in state_dict["state"].items()
        }
        loaded: Any = {**state_dict, "state": state}
        set_optimizer_state_dict(self._module, self._optimizer, loaded)


class _DescribedShard(Tensor):
    """Implements torch's interface of tensors that are described by chunks."""

    shard: Tensor
    _chunks: dict[torch.Size, Tensor]
    """Parts of ``shard`` by offsets in the full tensor."""

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
    described.shard = shard
    spans = layer.spans(name)
    chunks = shard.split([size for _, size in spans], dim)
    described._chunks = {
        torch.Size(start if d == dim else 0 for d in range(len(shape))): chunk
        for (start, _), chunk in zip(spans, chunks, strict=True)
    }
    return described
