"""Full (unsharded) state_dicts of models with sharded layers, and of their optimizers; sharded ones
for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel.data_parallel import as_full_tensor, distributed_like
from pipekernels.tensor_parallel.sharded import ShardKey, sharded_parameters


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of ``module`` with the parameters of every sharded layer gathered.

    A collective. ``DTensor``\\ s, such as FSDP2's parameters, are gathered too. Tensors are copies.

    Raises:
        TypeError: a sharded layer has a parametrization or a mask.
        RuntimeError: a hook of ``state_dict()`` replaces or removes a sharded parameter.
    """
    return gather_state_dict(module, keep=True)


def gather_state_dict(module: nn.Module, keep: bool) -> dict[str, Tensor]:
    """:func:`full_state_dict`, of which this rank only keeps what is replicated unless ``keep`` is
    set. It then holds one gathered parameter at a time."""
    sharded = sharded_parameters(module)
    state = module.state_dict(keep_vars=True)
    if not sharded.keys() <= {value for value in state.values() if isinstance(value, Tensor)}:
        raise RuntimeError(
            "a hook of state_dict() has replaced parameters of sharded "
            "layers; remove it, or gather layer by layer, layer.full_state_dict()"
        )
    # Full tensor of each tensor in ``state``; a tensor may have several keys there.
    full: dict[Tensor, Tensor] = {}
    for parameter, (layer, name) in sharded.items():
        gathered = layer.gather(name, parameter.detach())
        full[parameter] = gathered if keep else parameter.detach()
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value not in full:
                full[value] = as_full_tensor(value.detach()).clone()
            state[key] = full[value]
    return state


def full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state_dict of ``optimizer`` with the state of every sharded parameter gathered.

    A collective. :func:`load_full_optimizer_state_dict` loads it for any world size, and for the
    model without shards.

    Args:
        module: the model.
        optimizer: an optimizer of some or all parameters of ``module``.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}, ...]}``, with the
        names of :func:`full_state_dict`, as from torch's ``get_optimizer_state_dict``; copies.

    Raises:
        TypeError: state of a sharded parameter has another shape, as in ``Adafactor``; or its layer
            has a parametrization or a mask.
        ValueError: ``optimizer`` has a parameter that is not in the state_dict of ``module``.
    """
    sharded, names = sharded_parameters(module), _names(module, optimizer)
    packed = optimizer.state_dict()
    groups = copy.deepcopy(packed["param_groups"])
    state = {}
    # torch numbers parameters in the order of the groups; the result has names in their place.
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], own["params"], strict=True):
            if index in packed["state"]:
                state[names[parameter]] = {
                    key: _gathered(key, value, parameter, sharded.get(parameter))
                    for key, value in packed["state"][index].items()
                }
        group["params"] = [names[parameter] for parameter in own["params"]]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load this rank's shards of a :func:`full_optimizer_state_dict` into ``optimizer``.

    Not a collective, unless FSDP2 also shards the parameters.

    Args:
        module: the model, with or without sharded layers.
        optimizer: of the same class as the one that was saved.
        state_dict: the same on every rank; or ``optimizer.state_dict()`` of the model without
            shards, which numbers the parameters instead of naming them.

    Raises:
        TypeError: a sharded layer has a parametrization or a mask.
        ValueError: the groups of ``optimizer`` have other parameters, or in another order; or state
            of a sharded parameter has another shape. ``optimizer`` is then unchanged.
    """
    sharded, names = sharded_parameters(module), _names(module, optimizer)
    state = {}
    groups = state_dict["param_groups"]
    # Torch refuses other numbers of groups, or of parameters in a group.
    for i, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        given, keys = [names[parameter] for parameter in own["params"]], list(group["params"])
        if keys != given and all(isinstance(key, str) for key in keys):
            raise ValueError(
                f"group {i} of the optimizer has the parameters {', '.join(given)}, but in "
                f"the state it has {', '.join(map(str, keys))}; make it like the one that was saved"
            )
        for key, parameter in zip(keys, own["params"], strict=False):
            if key in state_dict["state"]:
                state[key] = {
                    entry: _own_shard(entry, value, parameter, sharded.get(parameter))
                    for entry, value in state_dict["state"][key].items()
                }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The (first) name of each parameter in the state_dict of ``module``. Raises for others."""
    names: dict[Tensor, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the state_dict of the module; pass the model whose parameters it has, and "
                    "make the optimizer after tensor_parallelize()"
                )
    return names


def _gathered(key: str, value: Any, parameter: Tensor, shard_key: ShardKey | None) -> Any:
    """The full ``value`` of a sharded or replicated parameter's state, as a copy."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if shard_key is None or value.dim() == 0:
        return as_full_tensor(value).clone()
    if value.shape != parameter.shape:
        raise TypeError(
            f"the optimizer keeps a {key!r} of shape {tuple(value.shape)} for a sharded parameter "
            f"of shape {tuple(parameter.shape)}, which is neither a number nor sharded like it, "
            "and cannot be gathered; use an optimizer that works element by element, such as Adam"
        )
    layer, name = shard_key
    return layer.gather(name, value)


def _own_shard(key: str, value: Any, parameter: Tensor, shard_key: ShardKey | None) -> Any:
    """The inverse of :func:`_gathered`, as a copy."""
    if not isinstance(value, Tensor) or value.dim() == 0 or shard_key is None:
        shard = copy.deepcopy(value)
    else:
        layer, name = shard_key
        if value.shape != layer.full_shape(name):
            raise ValueError(
                f"the state has a {key!r} of shape {tuple(value.shape)} for a parameter whose full "
                f"shape is {layer.full_shape(name)}; pass what full_optimizer_state_dict() has "
                "returned, or the state_dict() of the optimizer of the model without shards"
            )
        shard = layer.shard(name, value)
    is_like = isinstance(shard, Tensor) and shard.shape == parameter.shape
    return distributed_like(parameter, shard) if is_like else shard


def checkpoint_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of ``module`` for ``torch.distributed.checkpoint``, with the place of each
    shard in the full tensor: :doc:`/guides/transformers` has an example.

    Nothing is gathered. The tensors share the model's memory, so ``dcp.load`` fills the model.
    Shards are tensors of the full shape without its memory, which only ``dcp.save`` and
    ``dcp.load`` understand.

    Raises:
        TypeError: a sharded layer has a parametrization or a mask, or weights of integers.
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
    if shard.dim() != len(shape):
        raise TypeError(
            f"{layer.name!r} has weights of integers in the kernel's order, which are no part of "
            "the full tensor; save full_state_dict(model)"
        )
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
