"""The plan of a model: which of its modules are sharded, and how.

A plan comes as patterns with words from the caller, or as ``"auto"`` from the provider of a model's
library, completed here where plans made for inference are incomplete. :func:`resolve` settles it
before anything is changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

from torch import nn

from pipekernels._arguments import check_kind
from pipekernels._torch_private import uncompiled
from pipekernels.tensor_parallel.full_layer import (
    REMEDY,
    check_weights,
    extras_of,
    is_embedding,
    is_hooked,
    linear_classes,
)
from pipekernels.tensor_parallel.functional import Heads, shares
from pipekernels.tensor_parallel.plan.kinds import (
    ATTENTION,
    COLUMN,
    EMBEDDING,
    GATHERED,
    KINDS,
    ROW,
    SIZED_KINDS,
    SUMMED,
    Kind,
    LayerKind,
    kinds_by_name,
    of_heads,
    parse,
)

K = TypeVar("K", bound=Kind)


class ShardingPlan(NamedTuple):
    """What is done to the modules of a model, by their names."""

    kinds: dict[str, Kind]
    heads: Mapping[str, Heads] = {}
    """Of planned modules: of which heads their features are."""
    divided: Mapping[str, Sequence[str]] = {}
    """Attributes of which a rank has its share."""
    attributes: Mapping[str, Mapping[str, Sequence[int]]] = {}
    """What attributes are to be, by rank."""

    def modules(self, model: nn.Module, kind: type[K]) -> dict[nn.Module, tuple[str, K]]:
        """The modules of ``model`` whose kinds are of a class, each with a name and its kind."""
        found: dict[nn.Module, tuple[str, K]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            own = self.kinds.get(name)
            if isinstance(own, kind):
                found.setdefault(module, (name, own))
        return found


class PlanProvider:
    """What ``tensor_parallelize`` cannot see in the models of a library. It is asked once the
    library is in ``sys.modules``. By default, methods do nothing."""

    library: str

    def base_of(self, model: nn.Module) -> nn.Module:
        """The model whose names plans use, inside a wrapper of the library."""
        return model

    def plan_of(self, model: nn.Module, world_size: int) -> ShardingPlan | None:
        """The plan for ``"auto"``, or None if the library has none for this model. Kinds of the
        class :class:`Kind` are not supported.

        Raises:
            ValueError: no plan can be right for this model.
        """

    def parts_of(self, name: str, module: nn.Module, kind: LayerKind) -> dict[str, nn.Module]:
        """The layers of ``module`` by name, if it wraps some. TypeError if they must stay whole."""
        return {}

    def prepare(self, model: nn.Module) -> None:
        """Change what a model with sharded layers needs changed."""


_PROVIDERS: list[PlanProvider] = []  # In the order in which they are asked.


def register_plan_provider(provider: PlanProvider) -> None:
    """Let ``tensor_parallelize`` ask ``provider``, before those registered earlier."""
    _PROVIDERS.insert(0, provider)


def providers() -> list[PlanProvider]:
    """The providers of libraries that the process has imported."""
    return [provider for provider in _PROVIDERS if provider.library in sys.modules]


def base_of(model: nn.Module) -> nn.Module:
    """The model whose names plans use, which torch.compile or a library may have wrapped."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    model = uncompiled(model)
    for provider in providers():
        model = provider.base_of(model)
    return model


def _parts_of(name: str, module: nn.Module, kind: LayerKind) -> dict[str, nn.Module]:
    """The layers to shard in ``module``, perhaps only itself. TypeError if they must stay whole."""
    parts = (provider.parts_of(name, module, kind) for provider in providers())
    return next(filter(None, parts), {name: module})


def resolve(
    model: nn.Module, plan: Mapping[str, str] | Literal["auto"], world_size: int
) -> ShardingPlan:
    """The plan of ``tensor_parallelize(model, plan, comm)``, checked: its kinds are for single
    layers, of which adapters have several, and for modules that get hooks.

    Args:
        model: the full model, without wrappers (:func:`base_of`).
        plan: as for ``tensor_parallelize``.
        world_size: number of ranks.

    Raises:
        TypeError: a pattern matches a module of a class that cannot be sharded, or one with extras.
        ValueError: the plan does not fit the model otherwise; ``"auto"`` finds no plan, or one of
            kinds that are not supported, or fewer attention heads than there are ranks.
    """
    if plan == "auto":
        resolved = _auto(model, world_size)
    elif isinstance(plan, str):
        raise ValueError(f"plan must be a mapping or 'auto', got {plan!r}")
    else:
        check_kind("plan", plan, Mapping, "a mapping of patterns to kinds, or 'auto'")
        kinds, unused = kinds_by_name(model, _parsed(plan))
        if unused:
            raise ValueError(
                f"no module's name matches {', '.join(map(repr, sorted(unused)))}; see the names "
                "in model.named_modules()"
            )
        resolved = ShardingPlan(kinds | dict.fromkeys(_between(model, kinds, {}), SUMMED))
    modules = dict(model.named_modules(remove_duplicate=False))
    # A wrapper that needs what it wraps whole may be around several layers.
    outers = {n for name in resolved.kinds for n in accumulate(name.split("."), "{}.{}".format)}
    layers = {name for name, kind in resolved.kinds.items() if isinstance(kind, LayerKind)}
    for name in sorted(outers - layers):
        _parts_of(name, modules[name], COLUMN)
    # A module with several names is sharded once, and all its names must agree.
    kinds, by_layer = {}, dict[nn.Module, LayerKind]()
    for name, module in modules.items():
        kind = resolved.kinds.get(name)
        if not isinstance(kind, LayerKind):
            kinds |= {name: kind} if kind else {}
            continue
        pattern = plan if plan == "auto" else next(p for p in plan if fnmatchcase(name, p))
        for part, layer in _parts_of(name, module, kind).items():
            if layer is model:
                raise ValueError(
                    f"{pattern!r} matches the model itself, which cannot be replaced in place; use "
                    "a narrower pattern, or RowParallelLinear.from_linear(layer, comm)"
                )
            _check_layer(layer, kind, f"{pattern!r} matches {part!r}")
            known = by_layer.setdefault(layer, kind)
            if known != kind:
                raise ValueError(f"the plan makes {part!r} both {known.word!r} and {kind.word!r}")
            kinds[part] = kind
    _check_ties(model, by_layer)
    return resolved._replace(kinds=kinds)


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


def _auto(model: nn.Module, world_size: int) -> ShardingPlan:
    """The plan of a provider, or of torch's own layers, completed; raises as :func:`resolve`."""
    plans = (provider.plan_of(model, world_size) for provider in providers())
    plan = next(filter(None, plans), None) or ShardingPlan(_torch_layers(model))
    if not plan.kinds:
        layers = [n for n, module in model.named_modules() if isinstance(module, linear_classes())]
        shown = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan), and there is none for it here; "
            "write one that names its linear layers, such as {'*.q_proj': 'column', '*.o_proj': "
            f"'row'}}; it has {shown or 'no linear layers'}"
        )
    unsupported = {n: kind.word for n, kind in plan.kinds.items() if type(kind) is Kind}
    if unsupported:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: "
            f"{ {without_numbers(name): word for name, word in unsupported.items()} }; "
            "write a plan that leaves these modules as they are"
        )
    # What plans made for inference leave out: shared weights, and small modules that are trained.
    kinds = _with_tied(model, plan.kinds)
    kinds |= dict.fromkeys(_between(model, kinds, plan.heads), SUMMED)
    # Heads stay whole where a kind cuts attention.
    cut: dict[str, Heads] = {}
    for name, heads in plan.heads.items():
        of_whole_heads = of_heads(kinds[name], heads) if name in kinds else None
        if of_whole_heads is None:
            continue
        if heads[0] < world_size and kinds[name] == ROW:
            raise _indivisible(name, f"{heads[0]} heads or groups of heads", world_size)
        cut[name] = heads
        if heads[1] % world_size:  # Else ranks have as many features each.
            kinds[name] = of_whole_heads
    attributes = _attributes(model, plan.divided, cut, world_size)
    return plan._replace(kinds=kinds, attributes=attributes)


def without_numbers(name: str) -> str:
    """``name`` with ``*`` in place of numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _torch_layers(model: nn.Module) -> dict[str, Kind]:
    """Kinds of the layers of torch's transformers; other layers of such a model stay whole."""
    kinds: dict[str, Kind] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            kinds[name] = ATTENTION
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            prefix = f"{name}." if name else ""
            kinds |= {f"{prefix}linear1": COLUMN, f"{prefix}linear2": ROW}
    return kinds


def _attributes(
    model: nn.Module,
    divided: Mapping[str, Sequence[str]],
    cut: Mapping[str, Heads],
    world_size: int,
) -> dict[str, dict[str, list[int]]]:
    """The values, by rank, of module attributes that depend on the number of heads."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, module in model.named_modules():
        has_groups = "num_key_value_groups" in vars(module)
        if name not in divided and not has_groups:
            continue
        inner = [heads for layer, heads in cut.items() if layer.startswith(f"{name}.")]
        heads = max(inner, default=None)  # Query heads.
        own = found[name] = {}
        for key in divided.get(name, ()):
            value = getattr(module, key, None)
            if isinstance(value, int):
                # An attribute counts heads of queries, or else heads of keys, or their features.
                counted = heads if not heads or value % heads[0] == 0 else (heads[1], heads[1])
                if value % (counted[0] if counted else world_size):
                    raise _indivisible(name, f"{key}={value}", world_size)
                own[key] = shares(value, world_size, counted)
        if has_groups and heads is not None and heads[1] < world_size:
            own["num_key_value_groups"] = shares(heads[0], world_size, heads)
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


def _check_ties(model: nn.Module, layers: Mapping[nn.Module, LayerKind]) -> None:
    """Raise ValueError if one of ``layers`` shares a parameter, but for the weight of layers whose
    kinds can tie it."""
    for parameter, owners in _shared_parameters(model).items():
        if not layers.keys().isdisjoint(owners.values()) and not all(
            module in layers and layers[module].can_tie and module.weight is parameter
            for module in owners.values()
        ):
            can = [repr(k.word) for k in KINDS.values() if isinstance(k, LayerKind) and k.can_tie]
            raise ValueError(
                f"{' and '.join(map(repr, owners))} share a parameter; name all of them in the "
                f"plan, as {' or '.join(can)}, or untie them first"
            )


def _with_tied(model: nn.Module, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """``kinds`` with the embeddings that share the weight of a sharded head; without the layers
    that share a parameter with something else, and without embeddings that are more than a lookup
    or have hooks, as under gradient checkpointing. Of an embedding or a head in a wrapper,
    the layers of the wrapper, if they may be sharded."""
    groups = [owners.keys() for owners in _shared_parameters(model).values()]
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {
        part: kind
        for name, kind in kinds.items()
        for part in (
            _layers_in(name, modules[name]) or ()
            if isinstance(kind, LayerKind) and kind.is_of_vocabulary
            else (name,)
        )
    }
    # An embedding must be a plain lookup, as it is replaced.
    lookups = {name for name, m in modules.items() if is_embedding(m) and not is_hooked(m)}
    wrappers = tuple(f"{name}." for name, m in modules.items() if _layers_in(name, m) is None)
    lookups = {name for name in lookups if not name.startswith(wrappers)}
    whole = {name for name, kind in kinds.items() if kind == EMBEDDING} - lookups
    tied = dict(kinds)
    for names in groups:
        others = {name for name in names if kinds.get(name) != GATHERED}
        if len(others) < len(names) and others <= lookups:
            tied |= dict.fromkeys(others, EMBEDDING)
        else:
            whole |= names
    # A group is sharded as a whole or not at all, which may keep further groups whole.
    while split := [names for names in groups if whole & names and names - whole]:
        whole = whole.union(*split)
    left = {modules[name] for name in whole}
    return {name: kind for name, kind in tied.items() if modules[name] not in left}


def _layers_in(name: str, module: nn.Module) -> list[str] | None:
    """The names of the layers to shard in an embedding or a head; None if it must stay whole."""
    try:
        return list(_parts_of(name, module, EMBEDDING))
    except TypeError:
        return None


def _shared_parameters(model: nn.Module) -> dict[nn.Parameter, dict[str, nn.Module]]:
    """The modules that share a parameter, by name."""
    owners: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, {})[name] = module
    return {parameter: named for parameter, named in owners.items() if len(named) > 1}
