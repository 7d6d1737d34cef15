"""The plan ``"auto"``: what a library knows of a model, with what such plans leave out."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from pipekernels.tensor_parallel.full_layer import is_embedding, is_hooked, linear_classes
from pipekernels.tensor_parallel.plan.kinds import (
    COLUMN,
    EMBEDDING,
    GATHERED,
    PACKED,
    SHARED,
    SUMMED,
    is_known,
)
from pipekernels.tensor_parallel.plan.providers import provided_plan


class AutoPlan(NamedTuple):
    """What ``tensor_parallelize(model, "auto", comm)`` does to a model."""

    plan: Mapping[str, str]
    divided: Mapping[str, Mapping[str, int]]
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
    provided = provided_plan(model)
    if provided is None:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    plan = _present(model, provided.kinds)
    unknown = {pattern: kind for pattern, kind in plan.items() if not is_known(kind)}
    if unknown:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: {unknown}; "
            "write a plan that leaves these modules as they are"
        )
    plan = _with_tied(model, plan)
    plan |= dict.fromkeys(_between(model, plan), SUMMED)
    divided = {p: dict.fromkeys(keys, world_size) for p, keys in provided.divided.items()}
    columns = [p for p, kind in plan.items() if kind.partition(":")[0] in (COLUMN, PACKED)]
    if divided or any("attn" in pattern or "attention" in pattern for pattern in columns):
        for what, heads in provided.heads.items():
            if heads % world_size:
                raise _uneven(type(model).__name__, f"{what}={heads}", world_size)
        plan, grouped = _with_shared_keys(model, plan, world_size)
        divided |= grouped
    return AutoPlan(plan, divided)


def _present(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """``plan`` without patterns of modules that the model's configuration leaves out."""
    names = [name for name, _ in model.named_modules()]
    return {p: kind for p, kind in plan.items() if any(fnmatchcase(name, p) for name in names)}


def _kind_of(plan: Mapping[str, str], name: str) -> str | None:
    return next((kind for pattern, kind in plan.items() if fnmatchcase(name, pattern)), None)


_SMALL = re.compile(r"(q|k|query|key)_?(norm|layernorm|layer_norm|ln)|act(ivation)?(_fn)?")


def _between(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Names of small modules with parameters between column- and row-parallel layers, which plans
    for inference leave out: norms of the queries and keys of a head, activations that are trained.

    Raises:
        ValueError: such a norm is over all heads or has weights for each, or another parameter has
            an element for each head.
    """
    found = []
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        children = dict(module.named_children())
        kinds = [(_kind_of(plan, prefix + child) or "").partition(":")[0] for child in children]
        if COLUMN not in kinds:
            continue
        size = getattr(module, "head_dim", None)
        for (child, layer), kind in zip(children.items(), kinds, strict=True):
            parameters = {} if kind else dict(layer.named_parameters(f"{prefix}{child}"))
            if "row" in kinds and parameters and _SMALL.fullmatch(child):
                is_norm = "norm" in child or "ln" in child
                of_heads = [key for key, p in parameters.items() if tuple(p.shape) != (size,)]
                if is_norm and size is not None and of_heads:
                    raise _of_all_heads(of_heads[0], parameters[of_heads[0]])
                found.append(prefix + child)
        for key, parameter in module.named_parameters():
            is_planned = any(_kind_of(plan, owner) for owner in _owners(prefix + key))
            if (
                size is not None
                and heads != size
                and parameter.shape == (heads,)
                and not is_planned
            ):
                raise _of_all_heads(prefix + key, parameter)
    return found


def _owners(key: str) -> list[str]:
    """The names of the modules that a parameter is in."""
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _of_all_heads(key: str, parameter: nn.Parameter) -> ValueError:
    return ValueError(
        f"{key!r}, of shape {tuple(parameter.shape)}, is for all heads, of which a rank would have "
        "a part, and no kind of a plan shards it; leave the attention of this model whole, in a "
        "plan for its MLPs"
    )


def _with_tied(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """``plan`` with the embeddings that share the weight of a sharded head; without the layers that
    share a parameter with something else, and without embeddings that are more than a lookup or
    have hooks, such as that of gradient checkpointing."""

    kind_of = functools.partial(_kind_of, plan)
    modules = dict(model.named_modules())
    whole = {
        name
        for name, module in modules.items()
        if kind_of(name) == EMBEDDING and (not is_embedding(module) or is_hooked(module))
    }
    added: dict[str, str] = {}
    for names in _tied_modules(model):
        heads = [name for name in names if kind_of(name) == GATHERED]
        others = [name for name in names if name not in heads]
        lookups = [modules[name] for name in others]
        if heads and all(is_embedding(m) and not is_hooked(m) for m in lookups):
            added |= dict.fromkeys(others, EMBEDDING)
        else:
            whole.update(names)
    while any(0 < len(whole.intersection(names)) < len(names) for names in _tied_modules(model)):
        whole.update(*(names for names in _tied_modules(model) if whole.intersection(names)))
    kept = {p: kind for p, kind in plan.items() if not any(fnmatchcase(n, p) for n in whole)}
    return kept | {name: kind for name, kind in added.items() if name not in whole}


def _tied_modules(model: nn.Module) -> list[list[str]]:
    """Names of modules that share a parameter."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _uneven(owner: str, heads: str, world_size: int) -> ValueError:
    return ValueError(
        f"{owner} has {heads}, which {world_size} ranks cannot share evenly; use a number of ranks "
        "that divides it, or write a plan that shards its MLPs only"
    )


def _with_shared_keys(
    model: nn.Module, plan: Mapping[str, str], world_size: int
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """``plan`` with key heads that several ranks hold, where an attention module has fewer of them
    than there are ranks, and the attributes to divide then.

    Raises:
        ValueError: ranks cannot share the key heads of a module evenly.
    """
    shared: dict[str, str] = {}
    divided: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        keys = [f"{name}.{key}" for key in ("k_proj", "v_proj")]
        size: Any = getattr(module, "head_dim", None)
        layer: Any = getattr(module, "k_proj", None)
        if not isinstance(size, int) or _kind_of(plan, keys[0]) != COLUMN:
            continue
        heads = layer.out_features // size  # Of a layer with adapters, too.
        if heads % world_size == 0:
            continue
        if world_size % heads:
            raise _uneven(f"{name!r}", f"{heads} heads of keys", world_size)
        shared |= dict.fromkeys(keys, f"{SHARED}:{world_size // heads}")
        divided[name] = {"num_key_value_groups": world_size // heads}
    if not shared:
        return dict(plan), {}
    # A pattern must not match a name that has a kind of its own.
    names = [name for name, _ in model.named_modules()]
    others = {
        name: kind
        for pattern, kind in plan.items()
        for name in names
        if pattern.endswith((".k_proj", ".v_proj"))
        and fnmatchcase(name, pattern)
        and name not in shared
    }
    kept = {p: kind for p, kind in plan.items() if not p.endswith((".k_proj", ".v_proj"))}
    return kept | others | shared, divided
