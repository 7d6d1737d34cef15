"""Quantizes the sharded layers of a model to integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from pipekernels._arguments import check_kind
from pipekernels.tensor_parallel.integers.formats import Format, make_integers
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
        TypeError: a sharded layer has a parametrization or a mask.
        ValueError: ``bits`` or ``group_size`` is another; there are no sharded linear layers or
            experts; a layer has ``invariant=True``, input features of a rank that groups do not
            divide, or weights that are not finite. The model is then unchanged.
    """
    formats = rounding(model, bits, group_size)
    _check_finite(list(formats))
    for layer, format in formats.items():
        make_integers(layer, format)
    return model.requires_grad_(False)


def rounding(model: nn.Module, bits: int, group_size: int | None) -> dict[ShardedLayer, Format]:
    """The formats of all layers whose weights can be integers. For arguments and errors see
    :func:`quantize_weights`; values of weights are not looked at."""
    check_kind("model", model, nn.Module, "an nn.Module")
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {bits!r}")
    group = 32 if bits == 4 and group_size is None else group_size
    if group is not None and (type(group) is not int or group < 32 or group % 32):
        raise ValueError(f"group_size must be a multiple of 32, or None, got {group_size!r}")
    layers = [layer for layer in sharded_layers(model) if layer.matrices and not layer.integers]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no sharded linear layers or experts in floats; call "
            "tensor_parallelize() first"
        )
    formats = dict.fromkeys(layers, Format(bits, group))
    check_formats(formats)
    return formats


def check_formats(formats: Mapping[ShardedLayer, Format]) -> None:
    """Raise ValueError if a layer cannot have integers of its format."""
    for layer, format in formats.items():
        if layer.invariant:
            raise ValueError(
                f"{layer._described()} has invariant=True, which does not support weights of "
                "integers: its bits come from products of floats; shard the model without it"
            )
        format.check(layer)


def check_finite(layer: ShardedLayer) -> None:
    """Raise ValueError if a weight of ``layer`` on this rank is not finite."""
    if not _is_finite(layer):
        raise _not_finite(layer)


def _check_finite(layers: Sequence[ShardedLayer]) -> None:
    """:func:`check_finite` on all ranks, if it raises on any."""
    bad = [not _is_finite(layer) for layer in layers]
    # For each communicator a flag per layer, false for others' layers: its place is the layer's.
    for comm in dict.fromkeys(layer.comm for layer in layers):
        flags = [flag and layer.comm is comm for flag, layer in zip(bad, layers, strict=True)]
        on_any = comm.all_gather(torch.tensor([flags], device="cpu")).any(0).tolist()
        if any(on_any):
            raise _not_finite(layers[on_any.index(True)])


def _is_finite(layer: ShardedLayer) -> bool:
    return all(bool(p.isfinite().all()) for p in layer._plain_parameters().values())


def _not_finite(layer: ShardedLayer) -> ValueError:
    return ValueError(
        f"{layer._described()} has weights that are not finite, which integers cannot represent; "
        "repair them, or leave this layer as it is"
    )
