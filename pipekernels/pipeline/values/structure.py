"""Separates values passed between layers into their tensors and the structure around these."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipekernels._torch_private import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from pipekernels.local_ops.p2p_copy import p2p_copy


class NoChunk:
    """Marks a tensor in a pipe's input that every micro-batch gets unsplit, such as a mask over
    positions.

    Args:
        tensor: must not require a gradient.

    Raises:
        TypeError: ``tensor`` is no tensor.
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
    """Let pipes cut values of a class, among their inputs and targets, into micro-batches.

    For what is no tensor of rows: a ``PackedSequence``, a graph, a list of images of different
    sizes in a class of its own. Beside it there must be a tensor, whose rows give the sizes. Such a
    value gets no gradients.

    Args:
        kind: the class itself; subclasses are others.
        split: ``split(value, sizes)`` returns one value for each micro-batch, of so many rows.

    Raises:
        TypeError: ``kind`` is no class, or one of tensors, tuples, lists or dicts.
    """
    if not isinstance(kind, type) or kind in (tuple, list, dict) or issubclass(kind, torch.Tensor):
        raise TypeError(
            f"kind is {kind!r}; it must be a class of its own, not one of tensors or plain "
            "containers, which are cut by their rows"
        )
    _splits[kind] = split


def _is_cut(value: object) -> bool:
    return type(value) in _splits


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
        parameters = inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):  # A forward that is not written in Python may have none.
        return value
    kinds = [parameter.kind for parameter in parameters]
    if len(kinds) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return value
    if isinstance(value, tuple):
        return Arguments(value, {})
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    named = takes_any or value.keys() <= {parameter.name for parameter in parameters}
    return Arguments((), value) if named else value


class _Tensor:
    """Placeholder for a tensor among the leaves of a value."""


_TENSOR = _Tensor()


class Structure:
    """A value without its tensors.

    Args:
        spec: its containers.
        leaves: their leaves, with ``_TENSOR`` in place of each tensor.
    """

    def __init__(self, spec: TreeSpec | _Spec, leaves: Sequence[Any]) -> None:
        self._spec = spec
        self._leaves = leaves

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with ``tensors``."""
        if self is SINGLE_TENSOR:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return _unflatten_tree(leaves, self._spec)

    def on(self, device: torch.device) -> Structure:
        """This structure with its unsplit (:class:`NoChunk`) tensors on ``device``."""
        leaves = [
            p2p_copy(leaf, device)
            if isinstance(leaf, torch.Tensor) and leaf.device != device
            else leaf
            for leaf in self._leaves
        ]
        moved = any(new is not old for new, old in zip(leaves, self._leaves, strict=True))
        return Structure(self._spec, leaves) if moved else self

    def cut(self, sizes: Sequence[int]) -> list[Structure]:
        """One structure for each micro-batch, of ``sizes`` rows: with its part of each value of a
        class that :func:`register_split` knows.

        Raises:
            ValueError: a value has been cut into another number of parts.
        """
        if not any(map(_is_cut, self._leaves)):
            return [self] * len(sizes)
        columns = []
        for leaf in self._leaves:
            parts = list(_splits[type(leaf)](leaf, sizes)) if _is_cut(leaf) else [leaf] * len(sizes)
            if len(parts) != len(sizes):
                raise ValueError(
                    f"the function that cuts a {type(leaf).__name__} returned {len(parts)} parts "
                    f"for {len(sizes)} micro-batches of {list(sizes)} rows"
                )
            columns.append(parts)
        return [Structure(self._spec, leaves) for leaves in zip(*columns, strict=True)]

    def has_same_layout(self, other: Structure) -> bool:
        """Whether both have the same containers, with tensors in the same places."""
        return self is other or (
            self._spec == other._spec
            and [leaf is _TENSOR for leaf in self._leaves]
            == [leaf is _TENSOR for leaf in other._leaves]
        )


SINGLE_TENSOR = Structure(tree_flatten(_TENSOR)[1], (_TENSOR,))
"""The structure of a value that is a tensor."""


def merged(structures: Sequence[Structure]) -> Structure:
    """The structure of a mini-batch's value from the fitting ones of its micro-batches: a leaf that
    is no tensor becomes a list with an entry per micro-batch, but None stays None."""
    first = structures[0]
    if all(leaf is _TENSOR for leaf in first._leaves):
        return first
    leaves: list[Any] = []
    for column in zip(*(structure._leaves for structure in structures), strict=True):
        same = column[0] is _TENSOR or all(leaf is None for leaf in column)
        leaves.append(column[0] if same else list(column))
    return Structure(first._spec, leaves)


def flatten(
    value: Any, *what: object, cuts: bool = False
) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """The tensors in ``value``, named ``what`` in errors, and its structure.

    Containers are tuples, named tuples, lists, dicts, dataclasses and classes registered with
    torch's pytree; with ``cuts``, not those that :func:`register_split` knows.

    Raises:
        TypeError: ``value`` has no tensor, or one in a dict that pytree does not know, which would
            be neither split nor differentiated.
    """
    if isinstance(value, torch.Tensor):
        return (value,), SINGLE_TENSOR
    leaves, spec = _flatten_tree(value, _is_cut if cuts and _splits else None)
    for leaf in leaves:
        if isinstance(leaf, dict) and tensors_in(list(leaf.values())):
            raise TypeError(
                f"{' '.join(map(str, what))} has tensors in a {type(leaf).__name__}, which torch's "
                "pytree does not know; pass a plain dict, or register the class there "
                "(torch.utils._pytree.register_pytree_node)"
            )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if not tensors:
        raise TypeError(
            f"{' '.join(map(str, what))} must be a tensor or a tuple, list or dict with at least "
            f"one tensor in it, not {_described(value)}"
        )
    marked = [
        _TENSOR
        if isinstance(leaf, torch.Tensor)
        else leaf.tensor
        if isinstance(leaf, NoChunk)
        else leaf
        for leaf in leaves
    ]
    return tensors, Structure(spec, marked)


def deny_packed(value: Any, what: str) -> None:
    """Raise a TypeError if there is a PackedSequence in ``value``, whose fields are no rows."""
    if PackedSequence in _splits:
        return
    if any(map(_is_packed, tree_leaves(value, is_leaf=_is_packed))):
        raise TypeError(
            f"{what} has a PackedSequence, whose rows cannot be cut into micro-batches; give the "
            "padded tensor and the lengths, and pack them in the first layer, register a function "
            "that cuts it (register_split), or use chunks=1"
        )


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in containers that torch's pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Record(NamedTuple):
    """A dataclass with tensors among the leaves of a value."""

    place: int
    kind: type
    fields: tuple[str, ...]
    spec: TreeSpec | _Spec
    """Of the list of its fields' values."""
    leaves: int
    """Number of leaves of these."""


class _Spec(NamedTuple):
    """The containers of a value, some of them dataclasses, which pytree takes for leaves."""

    outer: TreeSpec
    records: tuple[_Record, ...]


def _flatten_tree(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], TreeSpec | _Spec]:
    found, outer = tree_flatten(value, is_leaf=is_leaf)
    leaves = []
    records = []
    for place, leaf in enumerate(found):
        inner: list[Any] = []
        if dataclasses.is_dataclass(leaf) and not (isinstance(leaf, type) or _is_cut(leaf)):
            names = tuple([field.name for field in dataclasses.fields(leaf)])
            inner, spec = _flatten_tree([getattr(leaf, name) for name in names], is_leaf)
        if not any(isinstance(item, torch.Tensor) for item in inner):
            leaves.append(leaf)
            continue
        records.append(_Record(place, type(leaf), names, spec, len(inner)))
        leaves += inner
    return leaves, _Spec(outer, tuple(records)) if records else outer


def _unflatten_tree(leaves: Sequence[Any], spec: TreeSpec | _Spec) -> Any:
    if not isinstance(spec, _Spec):
        return tree_unflatten(leaves, spec)
    rest = iter(leaves)
    records = {record.place: record for record in spec.records}
    built = []
    for place in range(spec.outer.num_leaves):
        record = records.get(place)
        if record is None:
            built.append(next(rest))
            continue
        # Not by the constructor, which may take other arguments.
        value: Any = object.__new__(record.kind)
        parts = _unflatten_tree([next(rest) for _ in range(record.leaves)], record.spec)
        for name, part in zip(record.fields, parts, strict=True):
            object.__setattr__(value, name, part)  # Works for frozen dataclasses too.
        built.append(value)
    return tree_unflatten(built, spec.outer)


def _described(value: Any) -> str:
    if isinstance(value, Arguments):
        return "arguments without any tensor"
    empty = isinstance(value, (tuple, list, dict)) and not value
    return ("an empty " if empty else "") + type(value).__name__
