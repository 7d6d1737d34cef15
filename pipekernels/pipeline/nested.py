"""Separates values passed between layers into their tensors and the structure around these.

Containers are torch's pytree nodes: tuples, named tuples, lists, dicts, and classes that are
registered there, such as the model outputs of Hugging Face. All other objects are leaves.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from pipekernels._torch_private import TreeSpec, tree_flatten, tree_leaves
from pipekernels.ops.device_copy import p2p_copy


class NoChunk:
    """Marks a tensor in a pipe's input that every microbatch gets unsplit, such as a mask over
    positions.

    Args:
        tensor: must not require a gradient.

    Raises:
        TypeError: ``tensor`` is not a tensor.
        ValueError: it requires a gradient.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"NoChunk takes a tensor, not {type(tensor).__name__}")
        if tensor.requires_grad:
            raise ValueError(
                "NoChunk takes a tensor that requires no gradient; detach it, or make it a "
                "parameter of the layer that uses it"
            )
        self.tensor = tensor


Split = Callable[[Any, Sequence[int]], Sequence[Any]]
_splits: dict[type, Split] = {}


def register_split(kind: type, split: Split) -> None:
    """Let pipes cut values of a class, among their inputs and targets, into microbatches.

    For values that are not tensors of rows: a ``PackedSequence``, a graph, a list of images of
    different sizes in its own class. Beside it there must be a tensor, whose rows give the sizes.
    Such a value gets no gradients.

    Args:
        kind: the class; not its subclasses.
        split: ``split(value, sizes)`` returns one value for each microbatch, of so many rows.

    Raises:
        TypeError: ``kind`` is not a class, or one of tensors, tuples, lists or dicts.
    """
    if not isinstance(kind, type) or kind in (tuple, list, dict) or issubclass(kind, torch.Tensor):
        raise TypeError(
            f"kind is {kind!r}; it must be a separate class, not one of tensors or plain "
            "containers, which are cut by their rows"
        )
    _splits[kind] = split


class Arguments(NamedTuple):
    """Several arguments of one layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(layer: nn.Module, value: Any) -> Any:
    """``value``, or the :class:`Arguments` that it has: a tuple's or a dict's entries, if the
    forward of ``layer`` takes several arguments and these are among them."""
    if type(value) not in (tuple, dict):
        return value
    try:
        parameters = inspect.signature(layer.forward).parameters
    except (TypeError, ValueError):  # It has no signature, as one not written in Python.
        return value
    kinds = [parameter.kind for parameter in parameters.values()]
    if len(kinds) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return value
    if isinstance(value, tuple):
        return Arguments(value, {})
    named = inspect.Parameter.VAR_KEYWORD in kinds or value.keys() <= parameters.keys()
    return Arguments((), value) if named else value


_TENSOR = object()  # Stands for a tensor among the leaves of a structure.


class Structure:
    """A value without its tensors.

    Args:
        layout: its containers; None for a tensor.
        leaves: its leaves, in order: ``_TENSOR`` for a tensor, and the tensor of a ``NoChunk``.
    """

    def __init__(self, layout: TreeSpec | None, leaves: Sequence[Any]) -> None:
        self._layout = layout
        self._leaves = leaves

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with ``tensors``."""
        if self._layout is None:  # A single tensor, as most layers take.
            return tensors[0]
        if len(tensors) == len(self._leaves):  # All are tensors.
            return self._layout.unflatten(tensors)
        rest = iter(tensors)
        return self._layout.unflatten([next(rest) if x is _TENSOR else x for x in self._leaves])

    def on(self, device: torch.device) -> Structure:
        """This structure with its unsplit (:class:`NoChunk`) tensors on ``device``."""
        if not any(isinstance(leaf, torch.Tensor) for leaf in self._leaves):
            return self
        moved = [p2p_copy(x, device) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return Structure(self._layout, moved)

    def cut(self, sizes: Sequence[int], device: torch.device | None = None) -> list[Structure]:
        """One structure for each microbatch, of ``sizes`` rows: with its part of each value of a
        class that :func:`register_split` knows, and on ``device``, if given.

        Raises:
            ValueError: a value has been cut into another number of parts.
        """
        if all(leaf is _TENSOR for leaf in self._leaves):
            return [self] * len(sizes)
        leaves = self._leaves if device is None else self.on(device)._leaves
        columns = []  # Of each leaf, its part for each microbatch.
        for leaf in leaves:
            split = _splits.get(type(leaf))
            parts = list(split(leaf, sizes)) if split else [leaf] * len(sizes)
            if len(parts) != len(sizes):
                raise ValueError(
                    f"the function that cuts a {type(leaf).__name__} returned {len(parts)} parts "
                    f"for {len(sizes)} microbatches of {list(sizes)} rows"
                )
            columns.append(parts)
        return [Structure(self._layout, part) for part in zip(*columns, strict=True)]

    def has_same_layout(self, other: Structure) -> bool:
        """Whether both have the same containers, with tensors in the same places."""
        mine, theirs = ([x is _TENSOR for x in each._leaves] for each in (self, other))
        return mine == theirs and self._layout == other._layout


SINGLE_TENSOR = Structure(None, [_TENSOR])
"""The structure of a value that is a tensor."""


@lru_cache(maxsize=256)
def _tuple_of(count: int) -> Structure:
    """The structure of a tuple of so many tensors."""
    return Structure(tree_flatten((_TENSOR,) * count)[1], [_TENSOR] * count)


def merged(structures: Sequence[Structure]) -> Structure:
    """The structure of a mini-batch's value from its microbatches' structures, of one layout: a
    leaf that is not a tensor becomes a list with an entry per microbatch, but None stays None."""
    if structures[0] is SINGLE_TENSOR:
        return SINGLE_TENSOR
    columns = zip(*[structure._leaves for structure in structures], strict=True)
    joined = [
        column[0] if all(x is _TENSOR or x is None for x in column) else list(column)
        for column in columns
    ]
    return Structure(structures[0]._layout, joined)


def flatten(
    value: Any, what: str, *, is_batch: bool = False
) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """The tensors in ``value``, named ``what`` in errors, and its structure.

    If it is a batch, to be cut, what :func:`register_split` knows is a leaf.

    Raises:
        TypeError: ``value`` has no tensor, one in a dict or dataclass that pytree does not know,
            which would be neither split nor differentiated.
    """
    if isinstance(value, torch.Tensor):
        return (value,), SINGLE_TENSOR
    if type(value) is tuple and {*map(type, value)} == {torch.Tensor}:
        return value, _tuple_of(len(value))  # Often; pytree would take twice as long.
    # Leaves, even if pytree knows the classes: tensors in them are not rows of the batch.
    whole = _splits if is_batch else {}
    leaves, layout = tree_flatten(value, (lambda each: type(each) in whole) if whole else None)
    tensors = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            leaves[i] = _TENSOR
        elif isinstance(leaf, NoChunk):
            leaves[i] = leaf.tensor
        elif type(leaf) not in _splits:
            _check_leaf(leaf, what)
    if not tensors:
        got = "arguments without one" if isinstance(value, Arguments) else type(value).__name__
        raise TypeError(
            f"{what} must be a tensor or a tuple, list or dict with at least one tensor in it, not "
            f"{got}"
        )
    return tuple(tensors), Structure(layout, leaves)


def _check_leaf(leaf: Any, what: str) -> None:
    if _holds_tensors(leaf):
        raise TypeError(
            f"{what} has tensors in a {type(leaf).__name__}, which torch's pytree does not know; "
            "pass a plain dict, or register the class there "
            "(torch.utils._pytree.register_pytree_node)"
        )


def _holds_tensors(leaf: Any) -> bool:
    """Whether a dict or a dataclass has tensors; one of options has none."""
    if isinstance(leaf, dict):
        entries = list(leaf.values())
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        entries = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    else:
        return False
    return any(isinstance(x, torch.Tensor) or _holds_tensors(x) for x in tree_leaves(entries))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in containers that torch's pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
