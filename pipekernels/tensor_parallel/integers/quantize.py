"""Quantizes the sharded layers of a model to integers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from pipekernels._arguments import check_kind
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.full_layer import REMEDY, is_hooked
from pipekernels.tensor_parallel.integers.layers import Format, IntegerExperts, IntegerLinear
from pipekernels.tensor_parallel.linear import ShardedLinear
from pipekernels.tensor_parallel.sharded import ShardedLayer, sharded_layers

Model = TypeVar("Model", bound=nn.Module)


def quantize_weights(model: Model, *, bits: int = 8, group_size: int | None = None) -> Model:
    """Quantize the weights of sharded linear layers and experts to integers, in place, for
    inference.

    A collective, after loading; returns ``model``, whose parameters no longer require gradients.
    :doc:`/guides/transformers` says what stays in floats, and what state dicts contain.

    Args:
        model: with sharded layers, in float32, bfloat16 or float16.
        bits: 8 or 4.
        group_size: elements of an output feature that share a scale, a multiple of 32. By default
            all of them in 8 bits, with scales in float32, and 32 in 4 bits. Scales of groups are
            bfloat16.

    Raises:
        TypeError: a sharded layer has hooks, or a parametrization or a mask.
        ValueError: ``bits`` or ``group_size`` is another; there are no sharded linear layers or
            experts; a layer has ``invariant=True``, input features of a rank that groups do not
            divide, or weights that are not finite. The model is then unchanged.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {bits!r}")
    group = 32 if bits == 4 and group_size is None else group_size
    if group is not None and (type(group) is not int or group < 32 or group % 32):
        raise ValueError(f"group_size must be a multiple of 32, or None, got {group_size!r}")
    format = Format(bits, group)
    found: list[Any] = [
        layer
        for layer in sharded_layers(model)
        if isinstance(layer, ShardedLinear)
        or (isinstance(layer, ParallelExperts) and layer.is_routed)
    ]
    layers = [layer for layer in found if type(layer) is not IntegerExperts]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no sharded linear layers or experts in floats; call "
            "tensor_parallelize() first"
        )
    for layer in layers:
        if layer.invariant:
            raise ValueError(
                f"{layer._described()} has invariant=True, which does not support weights of "
                "integers: its bits are those of products of floats; shard the model without it"
            )
        if is_hooked(layer):
            raise TypeError(f"{layer._described()} has hooks, which would be lost; {REMEDY}")
    # New layers, so that nothing has changed if one cannot be made; they replace the old at once.
    _check_finite(layers)
    replaced: dict[nn.Module, ShardedLayer] = {
        layer: IntegerLinear(layer, format)
        if isinstance(layer, ShardedLinear)
        else IntegerExperts(layer, format)
        for layer in layers
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return model.requires_grad_(False)


def _check_finite(layers: list[Any]) -> None:
    """Raise ValueError on all ranks if any rank has a weight that is not finite."""
    bad = [
        not all(bool(p.isfinite().all()) for p in layer._plain_parameters().values())
        for layer in layers
    ]
    # For each communicator a flag per layer, false for those of others: its place is the layer's.
    for comm in dict.fromkeys(layer.comm for layer in layers):
        flags = [flag and layer.comm is comm for flag, layer in zip(bad, layers, strict=True)]
        on_any = comm.all_gather(torch.tensor([flags], device="cpu")).any(0).tolist()
        if any(on_any):
            raise ValueError(
                f"{layers[on_any.index(True)]._described()} has weights that are not finite, which "
                "integers cannot represent; repair them, or leave this layer as it is"
            )
