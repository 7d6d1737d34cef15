"""Maps functions over nested containers of tensors, as modules take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from pipekernels._torch_private import TreeSpec, tree_flatten, tree_unflatten


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` with each leaf replaced by ``function(leaf, *leaves)``, where ``leaves`` are those
    at the same place in ``others``.

    Containers are dataclasses, dicts of any class, and classes registered with torch's pytree:
    tuples, named tuples, lists, and classes that libraries register, such as the model outputs of
    Hugging Face. All other objects are leaves.

    A container without changed leaves is returned itself, not a copy: a module may append to a list
    that it is given.

    Raises:
        ValueError: ``others`` have other containers than ``value``.
    """
    return _mapped(function, value, others)[0]


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in order."""
    found = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, value)
    return found


def _mapped(function: Callable[..., Any], value: Any, others: Sequence[Any]) -> tuple[Any, bool]:
    """The result, and whether it is not ``value`` itself. The caller cannot find that out:
    torch.compile does not trace "is" between containers."""
    # PackedSequence is a named tuple whose fields must not be mapped one by one.
    if not isinstance(value, (torch.Tensor, PackedSequence)):
        children, spec = _one_level(value)
        if not spec.is_leaf():
            columns = [spec.flatten_up_to(other) for other in others]
            mapped = [
                _mapped(function, row[0], row[1:]) for row in zip(children, *columns, strict=True)
            ]
            if not any(changed for _, changed in mapped):
                return value, False
            return tree_unflatten([new for new, _ in mapped], spec), True
        entries = _common_entries(value, others)
        if entries is not None:
            return _map_entries(function, value, entries)
    new = function(value, *others)
    return new, new is not value


def _one_level(value: Any) -> tuple[list[Any], TreeSpec]:
    entered = False

    def inside(node: Any) -> bool:
        nonlocal entered
        was_entered, entered = entered, True
        return was_entered

    return tree_flatten(value, is_leaf=inside)


def _entries(value: Any) -> dict[Any, Any] | None:
    """The fields of a dataclass, or the items of a dict whose class pytree does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value if isinstance(value, dict) else None


def _common_entries(value: Any, others: Sequence[Any]) -> list[dict[Any, Any]] | None:
    """The entries of all values; None if there are none, or classes or keys differ."""
    found: list[dict[Any, Any]] = []
    for item in (value, *others):
        entries = _entries(item) if type(item) is type(value) else None
        if entries is None or (found and entries.keys() != found[0].keys()):
            return None
        found.append(entries)
    return found


def _map_entries(
    function: Callable[..., Any], value: Any, entries: Sequence[dict[Any, Any]]
) -> tuple[Any, bool]:
    mapped = {}
    for key in entries[0]:
        first, *rest = (item[key] for item in entries)
        new, changed = _mapped(function, first, rest)
        if changed:
            mapped[key] = new
    if not mapped:
        return value, False
    # Not by the constructor, which may not accept the present entries.
    result = copy.copy(value)
    for key, new in mapped.items():
        if isinstance(result, dict):
            result[key] = new
        else:
            object.__setattr__(result, key, new)  # Works for frozen dataclasses too.
    return result, True
