"""The inverse of ``tensor_parallelize``."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from pipekernels.tensor_parallel.changes import undo_changes
from pipekernels.tensor_parallel.full_layer import REMEDY, is_hooked
from pipekernels.tensor_parallel.sharded import ShardedLayer, sharded_layers

Model = TypeVar("Model", bound=nn.Module)


def tensor_unparallelize(model: Model) -> Model:
    """Replace all sharded layers, in place, by full ones with the values of all shards, and undo
    what :func:`tensor_parallelize` has changed in other modules.

    A collective: all ranks call it, and all get the full model. Make optimizers afterwards: the
    layers have new parameters. :func:`full_optimizer_state_dict`, called before, keeps the state.

    Args:
        model: the model.

    Returns:
        ``model``.

    Raises:
        TypeError: a sharded layer has hooks, a parametrization or a mask, which would be lost; or
            the model itself is a sharded layer. The model is then unchanged.
    """
    if isinstance(model, ShardedLayer):
        raise TypeError(
            "the model itself is a sharded layer, which cannot be replaced in place; use "
            "layer.to_full()"
        )
    sharded = sharded_layers(model)
    for layer in sharded:
        if is_hooked(layer):
            raise TypeError(
                f"the sharded layer {layer.name!r} has hooks, which would be lost; {REMEDY}"
            )
    full = {layer: layer.to_full() for layer in sharded}
    first: dict[nn.Parameter, nn.Parameter] = {}
    for layer, module in full.items():  # Full layers share parameters as their shards do.
        for name, parameter in layer.named_parameters(recurse=False):
            if name not in module._parameters and "scale" in name:
                continue  # Of weights of int8.
            shared = first.setdefault(parameter, module.get_parameter(name))
            module.register_parameter(name, shared)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ShardedLayer):
                parent._modules[name] = full[child]
        undo_changes(parent)
    return model
