"""Separates values passed between layers into their tensors and the structure around these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

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


class Arguments(NamedTuple):
    """Several arguments of one layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Tensor:
    """Placeholder for a tensor among the leaves of a value."""


_TENSOR = _Tensor()


class Structure:
    """A value without its tensors.

    Args:
        spec: its containers.
        leaves: their leaves, with ``_TENSOR`` in place of each tensor.
    """

    def __init__(self, spec: TreeSpec, leaves: Sequence[Any]) -> None:
        self._spec = spec
        self._leaves = leaves

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with ``tensors``."""
        if self is LONE:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

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

    def foreign(self) -> str | None:
        """The type of the first leaf that is neither a split tensor nor a constant such as a
        number."""
        for leaf in self._leaves:
            if leaf is not _TENSOR and type(leaf) not in _PLAIN:
                return "NoChunk" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        return None

    def same(self, other: Structure) -> bool:
        """Whether both fit and have the same constants. Neither may have :meth:`foreign` leaves."""
        return self is other or (
            self.fits(other)
            and [(type(leaf), leaf) for leaf in self._leaves]
            == [(type(leaf), leaf) for leaf in other._leaves]
        )

    def fits(self, other: Structure) -> bool:
        """Whether both have the same containers, with tensors in the same places."""
        return self is other or (
            self._spec == other._spec
            and [leaf is _TENSOR for leaf in self._leaves]
            == [leaf is _TENSOR for leaf in other._leaves]
        )


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)

LONE = Structure(tree_flatten(_TENSOR)[1], (_TENSOR,))
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


def take_apart(value: Any, *what: object) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """The tensors in ``value``, named ``what`` in errors, and its structure.

    Containers are tuples, named tuples, lists, dicts and classes registered with torch's pytree.

    Raises:
        TypeError: ``value`` has no tensor, or one in a dict or dataclass that pytree does not know,
            which would be neither split nor differentiated.
    """
    if isinstance(value, torch.Tensor):
        return (value,), LONE
    leaves, spec = tree_flatten(value)
    for leaf in leaves:
        if _hides_tensors(leaf):
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in containers that torch's pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, dict):
        inside = list(leaf.values())
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        inside = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    else:
        return False
    return bool(tensors_in(inside))


def _described(value: Any) -> str:
    if isinstance(value, Arguments):
        return "arguments without any tensor"
    empty = isinstance(value, (tuple, list, dict)) and not value
    return ("an empty " if empty else "") + type(value).__name__
