"""``save_pretrained`` of transformers models with sharded layers writes the full model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from types import MethodType
from typing import Any

from torch import nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.changes import set_attribute
from pipekernels.tensor_parallel.sharded import ShardedLayer, sharded_layers, sharded_parameters
from pipekernels.tensor_parallel.state import gather_state_dict


def save_full_models(model: nn.Module) -> None:
    """Let ``save_pretrained`` of every transformers model in ``model`` that has sharded layers save
    the full weights. It becomes a collective: rank 0 writes, the others wait for it."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and sharded_layers(module):
            # On the object: others of its class have no sharded layers.
            set_attribute(module, "save_pretrained", MethodType(_save_pretrained, module))
    peft: Any = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel) and sharded_layers(model):
        set_attribute(model, "save_pretrained", MethodType(_save_adapters, model))


def _save_adapters(self: Any, save_directory: Any, **kwargs: Any) -> None:
    state_dict, comms = _full_state(self, kwargs)
    if state_dict is not None:
        type(self).save_pretrained(self, save_directory, state_dict=state_dict, **kwargs)
    for comm in comms:
        comm.barrier()


def _save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    **kwargs: Any,
) -> None:
    kwargs.update(is_main_process=is_main_process, state_dict=state_dict)
    state_dict, comms = _full_state(self, kwargs)
    if state_dict is not None:
        shards = sharded_parameters(self).items()
        shapes = {parameter: layer.full_shape(name) for parameter, (layer, name) in shards}
        count = sum(prod(shapes.get(p, p.shape)) for p in self.parameters())
        self.num_parameters = lambda *_, **__: count  # Goes into the index of the files.
        try:
            type(self).save_pretrained(self, save_directory, state_dict=state_dict, **kwargs)
        finally:
            del self.num_parameters
    for comm in comms:
        comm.barrier()


def _full_state(
    model: nn.Module, options: dict[str, Any]
) -> tuple[Mapping[str, Any] | None, set[Communicator]]:
    """What to save if this rank writes, else None; and the communicators of ``model``. Takes what
    decides it out of the options of ``save_pretrained``."""
    comms = {layer.comm for layer in sharded_layers(model)}
    writes = options.pop("is_main_process", True) and all(comm.rank == 0 for comm in comms)
    state_dict: Mapping[str, Any] | None = options.pop("state_dict", None)
    if state_dict is None:
        state_dict = gather_state_dict(model, keep=writes)
    else:
        _check_full(model, state_dict)
    return (state_dict if writes else None), comms


def _check_full(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, ShardedLayer):
            continue
        for parameter in module.shard_dims:
            key = f"{name}.{parameter}"
            value = state_dict.get(key)
            if value is not None and tuple(value.shape) != module.full_shape(parameter):
                raise ValueError(
                    f"state_dict has a {key!r} of shape {tuple(value.shape)}, a shard; the full "
                    f"model's is {module.full_shape(parameter)}: pass full_state_dict(model), or "
                    "none and call save_pretrained on all ranks"
                )
