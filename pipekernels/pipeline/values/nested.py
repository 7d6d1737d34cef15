"""Nested containers of tensors, as modules take and return them: opened and rebuilt in one place.

Containers are what torch's pytree knows (tuples, named tuples, lists, dicts, and classes that
libraries register, such as the model outputs of Hugging Face), dataclasses, and dicts of any other
class. All other objects are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from pipekernels._torch_private import PytreeNode, pytree_node


class Container(NamedTuple):
    """A container without its entries."""

    kind: type
    context: Any
    """What pytree rebuilds it from; otherwise its keys, or the names of its fields."""
    node: PytreeNode | None
    """How pytree rebuilds it; None if pytree does not know the class."""

    def filled(self, entries: Sequence[Any], like: Any = None) -> Any:
        """The container with ``entries``, and the other attributes of ``like``."""
        if self.node is not None:
            return self.node.unflatten_fn(entries, self.context)
        # Not by the constructor, which may take other arguments.
        value: Any = object.__new__(self.kind) if like is None else copy.copy(like)
        for name, entry in zip(self.context, entries, strict=True):
            if isinstance(value, dict):
                value[name] = entry
            else:
                object.__setattr__(value, name, entry)  # Also for frozen dataclasses.
        return value


def opened(value: Any) -> tuple[Container, list[Any]] | None:
    """The container ``value`` and its entries; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None  # Almost always.
    kind = type(value)
    node = pytree_node(value)
    if node is not None:
        entries, context = node.flatten_fn(value)
        return Container(kind, context, node), list(entries)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return Container(kind, names, None), [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return Container(kind, list(value), None), list(value.values())
    return None


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` with each leaf replaced by ``function(leaf, *leaves)``, where ``leaves`` are those
    at the same place in ``others``. A ``PackedSequence`` is a leaf.

    A container without changed leaves is returned itself, not a copy: a module may append to a list
    that it is given.

    Raises:
        ValueError: ``others`` have other containers than ``value``.
    """
    return _mapped(function, value, others)[0]


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in order. A ``PackedSequence`` is one."""
    found = None if isinstance(value, PackedSequence) else opened(value)
    if found is None:
        return [value]
    return [leaf for entry in found[1] for leaf in leaves(entry)]


def _mapped(function: Callable[..., Any], value: Any, others: Sequence[Any]) -> tuple[Any, bool]:
    """The result, and whether it is not ``value`` itself. The caller cannot find that out:
    torch.compile does not trace "is" between containers."""
    found = None if isinstance(value, PackedSequence) else opened(value)
    if found is None:
        new = function(value, *others)
        return new, new is not value
    container, entries = found
    columns = [_entries_like(value, container, entries, other) for other in others]
    mapped = [_mapped(function, row[0], row[1:]) for row in zip(entries, *columns, strict=True)]
    if not any(changed for _, changed in mapped):
        return value, False
    return container.filled([new for new, _ in mapped], value), True


def _entries_like(
    value: Any, container: Container, entries: Sequence[Any], other: Any
) -> Sequence[Any]:
    """The entries of ``other`` in the order of ``entries``, those of ``value``."""
    found = opened(other)
    if found is not None and type(other) is container.kind:
        if found[0].context == container.context and len(found[1]) == len(entries):
            return found[1]
        by_key = container.kind is dict or container.node is None
        if by_key and isinstance(other, dict) and other.keys() == value.keys():
            return [other[key] for key in value]
    raise ValueError(
        f"structure mismatch: {_described(value)} and {_described(other)} are at the same place; "
        "all values must have the same containers, with the same keys or as many entries"
    )


def _described(value: Any) -> str:
    found = opened(value)
    entries = list(value) if isinstance(value, dict) else len(found[1]) if found else 0
    return f"a {type(value).__name__}" + (f" of {entries}" if entries else "")
