"""What a plan does to the modules of a model, before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from torch import nn

from pipekernels._arguments import check_kind
from pipekernels.tensor_parallel.full_layer import (
    REMEDY,
    check_weights,
    extras_of,
    is_embedding,
    linear_classes,
)
from pipekernels.tensor_parallel.plan.auto import auto_plan
from pipekernels.tensor_parallel.plan.kinds import (
    ATTENTION,
    EMBEDDING,
    KINDS,
    NOT_REPLACED,
    SHARDED_ROWS,
    canonical,
    is_known,
)
from pipekernels.tensor_parallel.plan.providers import parts_of


class Matched(NamedTuple):
    """A plan, resolved. Modules have their name and kind."""

    layers: dict[nn.Module, tuple[str, str]]
    """Layers that sharded layers replace."""
    others: dict[nn.Module, tuple[str, str]]
    """Layers kept in place, with hooks added."""
    tied: list[list[nn.Module]]
    """Layers that share their weight."""
    divided: Mapping[str, Mapping[str, int]]
    """By patterns for module names: attributes, and what each is to be divided by."""


def match(model: nn.Module, plan: Mapping[str, str] | Literal["auto"], world_size: int) -> Matched:
    """Resolve ``plan``: see :func:`pipekernels.tensor_parallel.tensor_parallelize`.

    Raises:
        TypeError: a pattern matches a module of a class that cannot be sharded, or one with extras.
        ValueError: otherwise, the plan does not fit the model.
    """
    divided: Mapping[str, Mapping[str, int]] = {}
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f"plan must be a mapping or 'auto', got {plan!r}")
        plan, divided = auto_plan(model, world_size)
    layers, others = _match(model, _known_kinds(plan))
    return Matched(layers, others, _tied_weights(model, layers), divided)


def _known_kinds(plan: Mapping[str, str]) -> dict[str, str]:
    """``plan`` in our words."""
    for pattern in plan:
        check_kind("a key of plan", pattern, str, "a pattern for names of modules")
    kinds = {pattern: canonical(word) for pattern, word in plan.items()}
    for pattern, kind in kinds.items():
        if not is_known(kind):
            known = ", ".join(map(repr, KINDS))
            raise ValueError(f"plan[{pattern!r}] must be one of {known}, got {plan[pattern]!r}")
    return kinds


def _match(
    model: nn.Module, plan: Mapping[str, str]
) -> tuple[dict[nn.Module, tuple[str, str]], dict[nn.Module, tuple[str, str]]]:
    """The layers to replace and other modules, each with its name and kind."""
    layers: dict[nn.Module, tuple[str, str]] = {}
    others: dict[nn.Module, tuple[str, str]] = {}
    unused = set(plan)
    for name, module in model.named_modules(remove_duplicate=False):
        for pattern, kind in plan.items():
            if not fnmatchcase(name, pattern):
                continue
            unused.discard(pattern)
            if kind in NOT_REPLACED:
                others[module] = name, kind
                continue
            for part in parts_of(name, module, kind):
                _add(layers, part, pattern, model)
    if unused:
        raise ValueError(
            f"no module's name matches {', '.join(map(repr, sorted(unused)))}; see the names in "
            "model.named_modules()"
        )
    return layers, others


def _add(
    layers: dict[nn.Module, tuple[str, str]],
    part: tuple[str, nn.Module, str],
    pattern: str,
    model: nn.Module,
) -> None:
    name, module, kind = part
    if module is model:
        raise ValueError(
            f"{pattern!r} matches the model itself, which cannot be replaced in place; use a "
            "narrower pattern, or RowParallelLinear.from_linear(layer, comm)"
        )
    _check_class(module, name, pattern, kind)
    try:
        check_weights(module)
    except TypeError as error:
        raise TypeError(f"{pattern!r} matches {name!r}, but {error}") from None
    extras = None if kind == ATTENTION else extras_of(module)
    if extras is not None:
        raise TypeError(
            f"{pattern!r} matches {name!r}, which has {extras}; a shard would lose that, so "
            f"{REMEDY}"
        )
    known = layers.setdefault(module, (name, kind))[1]
    if known != kind:
        raise ValueError(f"the plan makes {name!r} both {known!r} and {kind!r}")


def _tied_weights(
    model: nn.Module, kinds: Mapping[nn.Module, tuple[str, str]]
) -> list[list[nn.Module]]:
    """Groups of layers to shard that share their weight, as an output head and an embedding do.

    Raises:
        ValueError: a layer to shard shares a parameter otherwise.
    """
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, module))
    tied = []
    for parameter, using in owners.items():
        modules = [module for _, module in using]
        if len(using) == 1 or kinds.keys().isdisjoint(modules):
            continue
        if not all(
            module in kinds and kinds[module][1] in SHARDED_ROWS and module.weight is parameter
            for module in modules
        ):
            raise ValueError(
                f"{' and '.join(repr(name) for name, _ in using)} share a parameter; name all of "
                f"them in the plan, as {' or '.join(map(repr, SHARDED_ROWS))}, or untie them first"
            )
        tied.append(modules)
    return tied


def _check_class(module: nn.Module, name: str, pattern: str, kind: str) -> None:
    if kind == EMBEDDING:
        fits, wanted = is_embedding(module), "nn.Embedding"
    elif kind == ATTENTION:
        fits, wanted = type(module) is nn.MultiheadAttention, "nn.MultiheadAttention"
    else:
        fits, wanted = type(module) in linear_classes(), "nn.Linear"
    if not fits:
        found = f"{type(module).__module__}.{type(module).__qualname__}"
        raise TypeError(
            f"{pattern!r} matches {name!r}, a {found}, but only {wanted} can be made {kind!r}; use "
            "a narrower pattern"
        )
