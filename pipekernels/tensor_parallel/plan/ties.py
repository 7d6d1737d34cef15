"""Layers that share a parameter, as an output head and an embedding do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pipekernels.tensor_parallel.full_layer import is_embedding, is_hooked
from pipekernels.tensor_parallel.plan.kinds import (
    EMBEDDING,
    GATHERED,
    KINDS,
    Kind,
    LayerKind,
)
from pipekernels.tensor_parallel.plan.providers import parts_of


def tied_layers(
    model: nn.Module, layers: Mapping[nn.Module, tuple[str, LayerKind]]
) -> list[list[nn.Module]]:
    """Groups of layers to shard that share their weight.

    Raises:
        ValueError: a layer to shard shares a parameter in another way.
    """
    tied = []
    for parameter, owners in _shared_parameters(model).items():
        if layers.keys().isdisjoint(owners.values()):
            continue
        if not all(
            module in layers and layers[module][1].can_tie and module.weight is parameter
            for module in owners.values()
        ):
            can = [repr(k.word) for k in KINDS.values() if isinstance(k, LayerKind) and k.can_tie]
            raise ValueError(
                f"{' and '.join(map(repr, owners))} share a parameter; name all of them in the "
                f"plan, as {' or '.join(can)}, or untie them first"
            )
        tied.append(list(owners.values()))
    return tied


def with_tied(model: nn.Module, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """``kinds`` with the embeddings that share the weight of a sharded head; without the layers
    that share a parameter with something else, and without embeddings that are more than a lookup
    or have hooks, such as that of gradient checkpointing. Of an embedding or a head in a wrapper,
    the layers of the wrapper, if they may be sharded."""
    groups = [owners.keys() for owners in _shared_parameters(model).values()]
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {
        part: kind
        for name, kind in kinds.items()
        for part in (_layers_in(name, modules[name]) or () if _is_of_vocabulary(kind) else (name,))
    }
    # An embedding must be a plain lookup, as it is replaced.
    lookups = {name for name, m in modules.items() if is_embedding(m) and not is_hooked(m)}
    wrappers = (f"{name}." for name, m in modules.items() if _layers_in(name, m) is None)
    for wrapper in wrappers:
        lookups = {name for name in lookups if not name.startswith(wrapper)}
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


def _is_of_vocabulary(kind: Kind) -> bool:
    return isinstance(kind, LayerKind) and kind.is_of_vocabulary


def _layers_in(name: str, module: nn.Module) -> list[str] | None:
    """The names of the layers to shard in an embedding or a head; None if it must stay whole."""
    try:
        return [part for part, _, _ in parts_of(name, module, EMBEDDING)]
    except TypeError:
        return None


def _shared_parameters(model: nn.Module) -> dict[nn.Parameter, dict[str, nn.Module]]:
    """The modules that share a parameter, by name."""
    owners: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, {})[name] = module
    return {parameter: named for parameter, named in owners.items() if len(named) > 1}
