"""The plan ``"auto"``: from the library of a model, completed where such plans are incomplete."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from pipekernels.tensor_parallel.full_layer import linear_classes
from pipekernels.tensor_parallel.functional import Heads, shares
from pipekernels.tensor_parallel.plan.kinds import (
    COLUMN,
    ROW,
    SUMMED,
    Kind,
    kinds_by_name,
    of_heads,
    parse,
)
from pipekernels.tensor_parallel.plan.providers import PROVIDERS, ProvidedPlan
from pipekernels.tensor_parallel.plan.ties import with_tied


class AutoPlan(NamedTuple):
    """What ``tensor_parallelize(model, "auto", comm)`` does to a model."""

    kinds: dict[str, Kind]
    """By names of modules."""
    attributes: dict[str, dict[str, list[int]]]
    """By names of modules: attributes, and what each is to be, by rank."""


def auto_plan(model: nn.Module, world_size: int) -> AutoPlan:
    """The plan for ``tensor_parallelize(model, "auto", comm)``.

    Args:
        model: the full model.
        world_size: number of ranks.

    Raises:
        ValueError: the model has no plan, or one of kinds that are not supported, or fewer
            attention heads than there are ranks.
    """
    plans = (provider.plan_of(model) for provider in PROVIDERS)
    provided = next((plan.with_towers(world_size) for plan in plans if plan is not None), None)
    if provided is None or not provided.words:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    # An unknown word is an error only if its pattern matches a module of this model.
    words = provided.words.items()
    named, _ = kinds_by_name(model, {p: parse(word) or Kind(word) for p, word in words})
    unsupported = {pattern for kind, pattern in named.values() if type(kind) is Kind}
    if unsupported:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: "
            f"{ {pattern: word for pattern, word in words if pattern in unsupported} }; "
            "write a plan that leaves these modules as they are"
        )
    # What plans made for inference leave out: shared weights, and small modules that are trained.
    kinds = with_tied(model, {name: kind for name, (kind, _) in named.items()})
    kinds |= dict.fromkeys(_between(model, kinds, provided.heads), SUMMED)
    # Heads stay whole where a kind cuts attention.
    cut: dict[str, Heads] = {}
    for name, heads in provided.heads.items():
        of_whole_heads = of_heads(kinds[name], heads) if name in kinds else None
        if of_whole_heads is None:
            continue
        if heads[0] < world_size and kinds[name] == ROW:
            raise _indivisible(name, f"{heads[0]} heads or groups of heads", world_size)
        cut[name] = heads
        if heads[1] % world_size:  # Else ranks have as many features each.
            kinds[name] = of_whole_heads
    return AutoPlan(kinds, _attributes(model, provided, cut, world_size))


def _attributes(
    model: nn.Module, provided: ProvidedPlan, cut: Mapping[str, Heads], world_size: int
) -> dict[str, dict[str, list[int]]]:
    """The values, by rank, of module attributes that depend on the number of heads."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, module in model.named_modules():
        keys = [k for p, own in provided.divided.items() if fnmatchcase(name, p) for k in own]
        if not (keys or "num_key_value_groups" in vars(module)):
            continue
        inner = [heads for layer, heads in cut.items() if layer.startswith(f"{name}.")]
        heads = max(inner, default=None)  # Those of the queries.
        found[name] = {}
        for key in keys:
            value = getattr(module, key, None)
            if isinstance(value, bool):  # A way of computing that needs whole weights: turned off.
                found[name][key] = [0] * world_size
            elif isinstance(value, int):
                # An attribute counts heads of queries, or else those of keys, or their features.
                counted = heads if not heads or value % heads[0] == 0 else (heads[1], heads[1])
                if value % (counted[0] if counted else world_size):
                    raise _indivisible(name, f"{key}={value}", world_size)
                found[name][key] = shares(value, world_size, counted)
        if heads is not None and heads[1] < world_size and hasattr(module, "num_key_value_groups"):
            found[name]["num_key_value_groups"] = shares(heads[0], world_size, heads)
    return found


_SMALL = re.compile(r"(q|k|query|key)_?(norm|layernorm|layer_norm|ln)|act(ivation)?(_fn)?")


def _between(model: nn.Module, kinds: Mapping[str, Kind], heads: Mapping[str, Heads]) -> list[str]:
    """Names of small modules with parameters between column- and row-parallel layers: norms of the
    queries and keys of a head, activations that are trained."""
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
            # Of a norm over all heads, or with weights for each, a rank would have a part.
            unlike = [key for key, shape in shapes.items() if shape != (size,)]
            if size is not None and unlike and ("norm" in child or "ln" in child):
                raise _of_all_heads(unlike[0], shapes[unlike[0]])
            found.append(prefix + child)
        # So it would of other parameters with an element for each head, such as sinks.
        counts = {heads[prefix + child][0] for child in children if prefix + child in heads}
        per_head = [(number,) for number in counts if size not in (None, number)]
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


def _indivisible(owner: str, what: str, world_size: int) -> ValueError:
    return ValueError(
        f"{owner!r} has {what}, which {world_size} ranks cannot share; use a number of ranks that "
        "divides it, or write a plan that shards its MLPs only"
    )
