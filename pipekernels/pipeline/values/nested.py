"""Nested containers of tensors, as modules take and return them: opened and rebuilt in one place.

Containers are what torch's pytree knows (tuples, named tuples, lists, dicts, and classes that
libraries register, such as the model outputs of Hugging Face), dataclasses, and dicts of any other
class. All other objects are leaves. Pytree's own functions would not open the last two.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from pipekernels._torch_private import PytreeNode, pytree_node


class Container(NamedTuple):
    """A container, or its layout. Layouts are equal if classes, keys and numbers of entries are."""

    kind: PytreeNode | type
    """How pytree rebuilds it; its class, if pytree does not know it."""
    context: Any
    """What pytree rebuilds it from; otherwise its keys, or the names of its fields."""
    entries: Sequence[Any]
    """Its entries; in a layout the layouts of these, None for a leaf."""

    def filled(self, entries: Sequence[Any], like: Any = None) -> Any:
        """The container with ``entries``, and the other attributes of ``like``."""
        if isinstance(self.kind, PytreeNode):
            return self.kind.unflatten_fn(entries, self.context)
        # Not by the constructor, which may take other arguments.
        value: Any = object.__new__(self.kind) if like is None else copy.copy(like)
        for name, entry in zip(self.context, entries, strict=True):
            if isinstance(value, dict):
                value[name] = entry
            else:
                object.__setattr__(value, name, entry)  # Also for frozen dataclasses.
        return value

    def built(self, leaves: Iterator[Any]) -> Any:
        """The container of this layout with the next ``leaves``."""
        return self.filled([next(leaves) if e is None else e.built(leaves) for e in self.entries])


def opened(value: Any) -> Container | None:
    """The container ``value``; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None  # Almost always.
    kind = type(value)
    node = pytree_node(value)
    if node is not None:
        entries, context = node.flatten_fn(value)
        return Container(node, context, entries)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return Container(kind, names, [getattr(value, name) for name in names])
    if isinstance(value, dict):
        return Container(kind, list(value), list(value.values()))
    return None


def flattened(
    value: Any,
    leaves: list[Any],
    is_leaf: Callable[[Any, Container], bool] = lambda value, _: isinstance(value, PackedSequence),
) -> Container | None:
    """Append the leaves of ``value``, in order, to ``leaves``, containers for which ``is_leaf`` is
    true among them; return the layout of ``value``, None for a leaf."""
    container = opened(value)
    if container is None or is_leaf(value, container):
        leaves.append(value)
        return None
    kind, context, entries = container
    return Container(kind, context, [flattened(entry, leaves, is_leaf) for entry in entries])


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in order. A ``PackedSequence`` is one."""
    found: list[Any] = []
    flattened(value, found)
    return found


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf replaced by ``function(leaf)``. A ``PackedSequence`` is a leaf.

    A container without changed leaves is returned itself, not a copy: a module may append to a list
    that it is given.
    """
    return _mapped(function, value)[0]


def _mapped(function: Callable[[Any], Any], value: Any) -> tuple[Any, bool]:
    """The result, and whether it is not ``value`` itself. The caller cannot find that out:
    torch.compile does not trace "is" between containers."""
    container = opened(value)
    if container is None or isinstance(value, PackedSequence):
        new = function(value)
        return new, new is not value
    mapped = [_mapped(function, entry) for entry in container.entries]
    if not any(changed for _, changed in mapped):
        return value, False
    return container.filled([new for new, _ in mapped], value), True
