"""Nested containers of tensors, as modules take and return them: walked and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


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
    return _mapped(function, value, others)[0]


def leaves(value: Any) -> list[Any]:
    """The leaves of ``value``, in order."""
    found = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, value)
    return found


# Whether something changed is handed up beside it, and containers are never compared: torch.compile
# does not trace "is" between them.


def _mapped(function: Callable[..., Any], value: Any, others: Sequence[Any]) -> tuple[Any, bool]:
    """The result, and whether it is another object than ``value``."""
    # A PackedSequence is a named tuple, but makes sense as a whole only.
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
        if _are_alike_dataclasses(value, others):
            return _with_fields_mapped(function, value, others)
    new = function(value, *others)
    return new, new is not value


def _one_level(value: Any) -> tuple[list[Any], TreeSpec]:
    entered = False

    def inside(node: Any) -> bool:
        nonlocal entered
        was_entered, entered = entered, True
        return was_entered

    return tree_flatten(value, is_leaf=inside)


def _are_alike_dataclasses(value: Any, others: Sequence[Any]) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(type(other) is type(value) for other in others)
    )


def _with_fields_mapped(
    function: Callable[..., Any], value: Any, others: Sequence[Any]
) -> tuple[Any, bool]:
    mapped = {}
    for field in dataclasses.fields(value):
        row = [getattr(item, field.name) for item in (value, *others)]
        new, changed = _mapped(function, row[0], row[1:])
        if changed:
            mapped[field.name] = new
    if not mapped:
        return value, False
    # Not dataclasses.replace: that runs __init__, which need not take what the fields hold by now.
    result = copy.copy(value)
    for name, new in mapped.items():
        object.__setattr__(result, name, new)  # a frozen one too
    return result, True
