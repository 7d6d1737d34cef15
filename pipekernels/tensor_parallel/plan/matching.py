"""Resolves a plan for a model before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from torch import nn

from pipekernels._arguments import check_kind
from pipekernels.tensor_parallel.full_layer import REMEDY, check_weights, extras_of
from pipekernels.tensor_parallel.plan.auto import auto_plan
from pipekernels.tensor_parallel.plan.kinds import (
    COLUMN,
    KINDS,
    SIZED_KINDS,
    HookKind,
    Kind,
    LayerKind,
    kinds_by_name,
    parse,
)
from pipekernels.tensor_parallel.plan.providers import parts_of
from pipekernels.tensor_parallel.plan.ties import tied_layers


class Matched(NamedTuple):
    """A resolved plan: modules with their names and kinds."""

    layers: dict[nn.Module, tuple[str, LayerKind]]
    """Layers that sharded layers replace."""
    hooked: dict[nn.Module, tuple[str, HookKind]]
    """Modules that stay and get hooks."""
    tied: list[list[nn.Module]]
    """Layers that share their weight."""
    attributes: Mapping[str, Mapping[str, Sequence[int]]]
    """By names of modules: attributes, and what each is to be, by rank."""


def match(model: nn.Module, plan: Mapping[str, str] | Literal["auto"], world_size: int) -> Matched:
    """Resolve ``plan``: see :func:`pipekernels.tensor_parallel.tensor_parallelize`.

    Raises:
        TypeError: a pattern matches a module of a class that cannot be sharded, or one with extras.
        ValueError: the plan does not fit the model otherwise.
    """
    attributes: Mapping[str, Mapping[str, Sequence[int]]] = {}
    if not isinstance(plan, str):
        named, unused = kinds_by_name(model, _parsed(plan))
        if unused:
            raise ValueError(
                f"no module's name matches {', '.join(map(repr, sorted(unused)))}; see the names "
                "in model.named_modules()"
            )
    elif plan == "auto":
        kinds, attributes = auto_plan(model, world_size)
        named = {name: (kind, "auto") for name, kind in kinds.items()}
    else:
        raise ValueError(f"plan must be a mapping or 'auto', got {plan!r}")
    # A wrapper that needs what it wraps whole may be around several layers.
    modules = dict(model.named_modules(remove_duplicate=False))
    outers = {outer for name in named for outer in accumulate(name.split("."), "{}.{}".format)}
    layer_names = {name for name, (kind, _) in named.items() if isinstance(kind, LayerKind)}
    for outer in sorted(outers - layer_names):
        parts_of(outer, modules[outer], COLUMN)
    # By modules: one with several names is sharded once, and all its names must agree.
    layers: dict[nn.Module, tuple[str, LayerKind]] = {}
    hooked: dict[nn.Module, tuple[str, HookKind]] = {}
    for name, module in modules.items():
        kind, pattern = named.get(name, (None, ""))
        if isinstance(kind, HookKind):
            hooked[module] = name, kind
        # A wrapper, such as a layer with adapters, has several layers in it.
        parts = parts_of(name, module, kind) if isinstance(kind, LayerKind) else []
        for part, layer, layer_kind in parts:
            if layer is model:
                raise ValueError(
                    f"{pattern!r} matches the model itself, which cannot be replaced in place; use "
                    "a narrower pattern, or RowParallelLinear.from_linear(layer, comm)"
                )
            _check_layer(layer, layer_kind, f"{pattern!r} matches {part!r}")
            known = layers.setdefault(layer, (part, layer_kind))[1]
            if known != layer_kind:
                raise ValueError(
                    f"the plan makes {part!r} both {known.word!r} and {layer_kind.word!r}"
                )
    return Matched(layers, hooked, tied_layers(model, layers), attributes)


def _parsed(plan: Mapping[str, str]) -> dict[str, Kind]:
    kinds = {}
    for pattern, word in plan.items():
        check_kind("a key of plan", pattern, str, "a pattern for names of modules")
        kind = parse(word)
        if kind is None:
            known = ", ".join(map(repr, KINDS | SIZED_KINDS))
            raise ValueError(f"plan[{pattern!r}] must be one of {known}, got {word!r}")
        kinds[pattern] = kind
    return kinds


def _check_layer(layer: nn.Module, kind: LayerKind, where: str) -> None:
    """Raise TypeError, which begins with ``where``, unless ``layer`` can be made ``kind``."""
    try:
        check_weights(layer)
    except TypeError as error:
        raise TypeError(f"{where}, but {error}") from None
    if not kind.accepts(layer):
        found = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise TypeError(
            f"{where}, a {found}, but only {kind.takes} can be made {kind.word!r}; use a narrower "
            "pattern"
        )
    extras = None if kind.checks_extras else extras_of(layer)
    if extras is not None:
        raise TypeError(f"{where}, which has {extras}; a shard would lose that, so {REMEDY}")
