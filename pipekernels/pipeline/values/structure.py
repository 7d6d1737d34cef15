"""Separates values passed between layers into their tensors and the structure around these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipekernels._torch_private import tree_leaves
from pipekernels.local_ops.p2p_copy import p2p_copy
from pipekernels.pipeline.values.nested import Container, opened


class NoChunk:
    """Marks a tensor in a pipe's input that every micro-batch gets unsplit, such as a mask over
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
    """Let pipes cut values of a class, among their inputs and targets, into micro-batches.

    For values that are not tensors of rows: a ``PackedSequence``, a graph, a list of images of
    different sizes in its own class. Beside it there must be a tensor, whose rows give the sizes.
    Such a value gets no gradients.

    Args:
        kind: the class; not its subclasses.
        split: ``split(value, sizes)`` returns one value for each micro-batch, of so many rows.

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
    except (TypeError, ValueError):  # A forward that is not written in Python may have none.
        return value
    kinds = [parameter.kind for parameter in parameters.values()]
    if len(kinds) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return value
    if isinstance(value, tuple):
        return Arguments(value, {})
    named = inspect.Parameter.VAR_KEYWORD in kinds or value.keys() <= parameters.keys()
    return Arguments((), value) if named else value


class Layout(NamedTuple):
    """A container, and the layouts of its entries: for a leaf, whether it is a tensor."""

    container: Container
    entries: tuple[Layout | bool, ...]


class Structure:
    """A value without its tensors.

    Args:
        layout: its containers.
        others: all other leaves, in order; of a :class:`NoChunk`, its tensor.
    """

    def __init__(self, layout: Layout | bool, others: Sequence[Any]) -> None:
        self._layout = layout
        self._others = others

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with ``tensors``."""
        if self._layout is True:
            return tensors[0]
        return _filled(self._layout, iter(tensors), iter(self._others))

    def on(self, device: torch.device) -> Structure:
        """This structure with its unsplit (:class:`NoChunk`) tensors on ``device``."""
        if not any(isinstance(leaf, torch.Tensor) for leaf in self._others):
            return self
        moved = [
            p2p_copy(leaf, device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self._others
        ]
        return Structure(self._layout, moved)

    def cut(self, sizes: Sequence[int]) -> list[Structure]:
        """One structure for each micro-batch, of ``sizes`` rows: with its part of each value of a
        class that :func:`register_split` knows.

        Raises:
            ValueError: a value has been cut into another number of parts.
        """
        if not any(type(leaf) in _splits for leaf in self._others):
            return [self] * len(sizes)
        columns = [_parts(leaf, sizes) for leaf in self._others]
        return [Structure(self._layout, others) for others in zip(*columns, strict=True)]

    def has_same_layout(self, other: Structure) -> bool:
        """Whether both have the same containers, with tensors in the same places."""
        return self is other or self._layout == other._layout


SINGLE_TENSOR = Structure(True, ())
"""The structure of a value that is a tensor."""


def merged(structures: Sequence[Structure]) -> Structure:
    """The structure of a mini-batch's value from those of its micro-batches, of the same layout: a
    leaf that is not a tensor becomes a list with an entry per micro-batch, but None stays None."""
    columns = zip(*(structure._others for structure in structures), strict=True)
    others = [None if all(leaf is None for leaf in column) else list(column) for column in columns]
    return Structure(structures[0]._layout, others)


def flatten(
    value: Any, what: str, *, chunks: int | None = None
) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """The tensors in ``value``, named ``what`` in errors, and its structure.

    Containers are tuples, named tuples, lists, dicts, dataclasses and classes registered with
    torch's pytree; with ``chunks``, the micro-batches that ``value`` is to be cut into, not those
    that :func:`register_split` knows.

    Raises:
        TypeError: ``value`` has no tensor, one in a dict that pytree does not know, which would be
            neither split nor differentiated, or a PackedSequence to be cut, whose fields are not
            rows.
    """
    if isinstance(value, torch.Tensor):
        return (value,), SINGLE_TENSOR
    found = _Leaves(what, chunks)
    layout = found.layout(value)
    if not found.tensors:
        raise TypeError(
            f"{what} must be a tensor or a tuple, list or dict with at least one tensor in it, not "
            f"{_described(value)}"
        )
    return tuple(found.tensors), Structure(layout, found.others)


class _Leaves:
    """The leaves of a value, ``what`` in errors, to be cut into ``chunks``, if at all."""

    def __init__(self, what: str, chunks: int | None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._what = what
        self._chunks = chunks

    def layout(self, value: Any) -> Layout | bool:
        """Append the leaves of ``value``, and return its layout."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return True
        is_cut = self._chunks is not None and type(value) in _splits
        if isinstance(value, PackedSequence) and not is_cut and (self._chunks or 0) > 1:
            raise TypeError(
                f"{self._what} has a PackedSequence, whose rows cannot be cut into micro-batches; "
                "give the padded tensor and the lengths, and pack them in the first layer, "
                "register a function that cuts it (register_split), or use chunks=1"
            )
        found = None if is_cut else opened(value)
        if found is None:
            self.others.append(value.tensor if isinstance(value, NoChunk) else value)
            return False
        container, entries = found
        tensors, others = len(self.tensors), len(self.others)
        layout = Layout(container, tuple([self.layout(entry) for entry in entries]))
        if container.node is not None:
            return layout
        if len(self.tensors) == tensors:
            self.others[others:] = [value]  # Options, which stay one object.
            return False
        if isinstance(value, dict):
            raise TypeError(
                f"{self._what} has tensors in a {type(value).__name__}, which torch's pytree does "
                "not know; pass a plain dict, or register the class there "
                "(torch.utils._pytree.register_pytree_node)"
            )
        return layout


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in containers that torch's pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _filled(layout: Layout | bool, tensors: Iterator[Any], others: Iterator[Any]) -> Any:
    if isinstance(layout, bool):
        return next(tensors if layout else others)
    return layout.container.filled([_filled(entry, tensors, others) for entry in layout.entries])


def _parts(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """What each micro-batch gets of ``leaf``."""
    split = _splits.get(type(leaf))
    if split is None:
        return [leaf] * len(sizes)
    parts = list(split(leaf, sizes))
    if len(parts) != len(sizes):
        raise ValueError(
            f"the function that cuts a {type(leaf).__name__} returned {len(parts)} parts for "
            f"{len(sizes)} micro-batches of {list(sizes)} rows"
        )
    return parts


def _described(value: Any) -> str:
    if isinstance(value, Arguments):
        return "arguments without any tensor"
    empty = isinstance(value, (tuple, list, dict)) and not value
    return ("an empty " if empty else "") + type(value).__name__
