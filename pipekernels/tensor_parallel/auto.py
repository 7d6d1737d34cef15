"""The plan that a transformers model carries, ``model.tp_plan``, in the words of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

ALIASES = {
    "colwise": "column",
    "colwise_gather_output": "column_gather_output",
    "rowwise": "row",
    "rowwise_split_input": "row_split_input",
}
"""transformers' words for the kinds of a plan."""

_STAYS_WHOLE = "embedding_rowwise"
"""A kind whose modules are left replicated: an embedding is a lookup, not a product."""


def carried_plan(model: nn.Module, world_size: int, kinds: Iterable[str]) -> dict[str, str]:
    """The plan for ``tensor_parallelize(model, "auto", comm)``.

    Embeddings, and an output head tied to one, stay replicated.

    Args:
        model: the full model.
        world_size: number of ranks.
        kinds: what a plan may name.

    Raises:
        ValueError: the model carries no plan, or one with kinds that are not supported, or its
            attention heads cannot be dealt out evenly.
    """
    carried: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not carried:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        shown = ", ".join(linear[:8]) + (", ..." if len(linear) > 8 else "")
        raise ValueError(
            f"{type(model).__name__} carries no plan (tp_plan); write one that names its linear "
            "layers, such as {'*.q_proj': 'column', '*.o_proj': 'row'}; it has "
            f"{shown or 'no nn.Linear'}"
        )
    named = {pattern: ALIASES.get(word, word) for pattern, word in carried.items()}
    known = {*kinds, _STAYS_WHOLE}
    unknown = {pattern: word for pattern, word in named.items() if word not in known}
    if unknown:
        raise ValueError(
            f"the plan of {type(model).__name__} has kinds that are not supported: {unknown}; "
            "write a plan that leaves these modules as they are"
        )
    tied = _tied_modules(model)
    plan = {
        pattern: kind
        for pattern, kind in named.items()
        if kind != _STAYS_WHOLE and not any(fnmatchcase(name, pattern) for name in tied)
    }
    if "column" in plan.values():
        _check_heads(model, world_size)
    return plan


def _tied_modules(model: nn.Module) -> list[str]:
    """Names of modules that share a parameter with another module."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)
    return [name for names in owners.values() if len(names) > 1 for name in names]


def _check_heads(model: nn.Module, world_size: int) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % world_size:
            raise ValueError(
                f"{type(model).__name__} has {field}={heads}, which {world_size} ranks cannot "
                "share evenly; use a number of ranks that divides it, or write a plan that shards "
                "its MLPs only"
            )
