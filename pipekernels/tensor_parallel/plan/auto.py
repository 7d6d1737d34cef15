"""The plan ``"auto"``: what a library knows of a model, and what such plans leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from pipekernels.tensor_parallel.full_layer import linear_classes
from pipekernels.tensor_parallel.plan.kinds import (
    COLUMN,
    ROW,
    SUMMED,
    Kind,
    LayerKind,
    kinds_by_name,
    parse,
    shared_kind,
)
from pipekernels.tensor_parallel.plan.providers import PROVIDERS
from pipekernels.tensor_parallel.plan.ties import with_tied


class AutoPlan(NamedTuple):
    """What ``tensor_parallelize(model, "auto", comm)`` does to a model."""

    kinds: dict[str, Kind]
    """By names of modules."""
    divided: dict[str, dict[str, int]]
    """By patterns for module names: attributes, and what each is to be divided by."""


def auto_plan(model: nn.Module, world_size: int) -> AutoPlan:
    """The plan for ``tensor_parallelize(model, "auto", comm)``.

    Args:
        model: the full model.
        world_size: number of ranks.

    Raises:
        ValueError: there is no plan for the model, or it has kinds that are not supported, or the
            attention heads cannot be divided evenly.
    """
    plans = (provider.plan_of(model) for provider in PROVIDERS)
    provided = next((plan for plan in plans if plan is not None), None)
    if provided is None:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    words = provided.words.items()
    named, _ = kinds_by_name(model, {p: parse(word) or Kind(word) for p, word in words})
    unsupported = {pattern for kind, pattern in named.values() if type(kind) is Kind}
    if unsupported:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: "
            f"{ {pattern: word for pattern, word in words if pattern in unsupported} }; "
            "write a plan that leaves these modules as they are"
        )
    kinds = with_tied(model, {name: kind for name, (kind, _) in named.items()})
    kinds |= dict.fromkeys(_between(model, kinds, provided.heads), SUMMED)
    divided = {p: dict.fromkeys(keys, world_size) for p, keys in provided.divided.items()}
    columns = [n for n, k in kinds.items() if isinstance(k, LayerKind) and k.has_partner]
    if divided or any("attn" in name or "attention" in name for name in columns):
        for what, heads in provided.heads.items():
            if heads % world_size:
                raise _uneven(type(model).__name__, f"{what}={heads}", world_size)
        _check_divided(model, provided.divided, world_size)
        for name, groups in _shared_keys(model, kinds, world_size).items():
            kinds[f"{name}.k_proj"] = kinds[f"{name}.v_proj"] = shared_kind(groups)
            divided[name] = divided.get(name, {}) | {"num_key_value_groups": groups}
    return AutoPlan(kinds, divided)


def _check_divided(
    model: nn.Module, divided: Mapping[str, tuple[str, ...]], world_size: int
) -> None:
    """Raise a ValueError if an attribute that is to be divided cannot be."""
    for name, module in model.named_modules():
        for pattern, attributes in divided.items():
            for attribute in attributes if fnmatchcase(name, pattern) else ():
                value = getattr(module, attribute, 0)
                if type(value) is int and value % world_size:
                    raise _uneven(f"{name!r}", f"{attribute}={value}", world_size)


_SMALL = re.compile(r"(q|k|query|key)_?(norm|layernorm|layer_norm|ln)|act(ivation)?(_fn)?")


def _between(model: nn.Module, kinds: Mapping[str, Kind], heads: Mapping[str, int]) -> list[str]:
    """Names of small modules with parameters between column- and row-parallel layers, which plans
    for inference leave out: norms of the queries and keys of a head, activations that are trained.

    Raises:
        ValueError: such a norm is over all heads or has weights for each, or another parameter has
            an element for each head.
    """
    found = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        children = {child: kinds.get(prefix + child) for child, _ in module.named_children()}
        if COLUMN not in children.values():
            continue
        size = getattr(module, "head_dim", None)
        for child, kind in children.items():
            shapes = _shapes(module.get_submodule(child), prefix + child)
            if kind or not shapes or not _SMALL.fullmatch(child) or ROW not in children.values():
                continue
            of_heads = [key for key, shape in shapes.items() if shape != (size,)]
            if size is not None and of_heads and ("norm" in child or "ln" in child):
                raise _of_all_heads(of_heads[0], shapes[of_heads[0]])
            found.append(prefix + child)
        per_head = [(number,) for number in heads.values() if size not in (None, number)]
        for key, shape in _shapes(module, name).items():
            parts = key.split(".")
            owners = {".".join(parts[:n]) for n in range(1, len(parts))}
            if shape in per_head and owners.isdisjoint(kinds):
                raise _of_all_heads(key, shape)
    return found


def _shapes(module: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(p.shape) for key, p in module.named_parameters(prefix)}


def _of_all_heads(key: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{key!r}, of shape {shape}, is for all heads, of which a rank would have a part, and no "
        "kind of a plan shards it; leave the attention of this model whole, in a plan for its MLPs"
    )


def _uneven(owner: str, heads: str, world_size: int) -> ValueError:
    return ValueError(
        f"{owner} has {heads}, which {world_size} ranks cannot share evenly; use a number of ranks "
        "that divides it, or write a plan that shards its MLPs only"
    )


def _shared_keys(model: nn.Module, kinds: Mapping[str, Kind], world_size: int) -> dict[str, int]:
    """The attention modules that have fewer key heads than there are ranks, and how many ranks are
    to hold each.

    Raises:
        ValueError: ranks cannot share the key heads of a module evenly.
    """
    shared = {}
    for name, module in model.named_modules():
        size: Any = getattr(module, "head_dim", None)
        layer: Any = getattr(module, "k_proj", None)
        if isinstance(size, int) and kinds.get(f"{name}.k_proj") == COLUMN:
            heads = layer.out_features // size  # Layers with adapters have this as well.
            if heads % world_size and world_size % heads:
                raise _uneven(f"{name!r}", f"{heads} heads of keys", world_size)
            if heads % world_size:
                shared[name] = world_size // heads
    return shared
