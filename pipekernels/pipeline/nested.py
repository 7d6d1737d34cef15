"""Nested containers of tensors, as modules take and return them: walked and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` with each of its leaves replaced by ``function(leaf, *leaves)``, where ``leaves``
    are those at the same place in ``others``.

    Containers are dataclasses and what torch's pytree knows: tuples, named tuples, lists, dicts,
    and the classes that libraries register there, such as the model outputs of Hugging Face. All
    else is a leaf.

    A container none of whose leaves changes is returned itself, not a copy: a module may be given a
    list to append to.

    Raises:
        ValueError: ``others`` are not built like ``value``.
    """
    # A PackedSequence is a named tuple, but makes sense as a whole only.
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return function(value, *others)
    children, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    if not (len(children) == 1 and children[0] is value):
        columns = [spec.flatten_up_to(other) for other in others]
        mapped = [map_leaves(function, *row) for row in zip(children, *columns, strict=True)]
        if all(new is old for new, old in zip(mapped, children, strict=True)):
            return value
        return tree_unflatten(mapped, spec)
    if dataclasses.is_dataclass(value) and all(type(other) is type(value) for other in others):
        return _map_fields(function, value, *others)
    return function(value, *others)


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in order."""
    found = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, value)
    return found


def _map_fields(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    old = {name: getattr(value, name) for name in names}
    new = {
        name: map_leaves(function, old[name], *(getattr(other, name) for other in others))
        for name in names
    }
    if all(new[name] is old[name] for name in names):
        return value
    # Not dataclasses.replace: that runs __init__, which need not take what the fields hold by now.
    changed = copy.copy(value)
    for name in names:
        object.__setattr__(changed, name, new[name])  # a frozen one too
    return changed
