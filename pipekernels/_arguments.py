"""Checks of arguments."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int: accepts integers of NumPy and tensors, but no bool or float.

    Raises:
        ValueError: it is not an integer of at least ``least``; the message has ``name``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return number


def check_kind(name: str, value: Any, types: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError, naming ``name``, unless ``value`` is of ``types``, ``wanted`` in words."""
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")


def check_integer(name: str, value: Any) -> None:
    """Raise TypeError, naming ``name``, unless ``value`` is an integer (of NumPy too)."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def whole(value: Any) -> Any:
    """An int for a number such as 4.0, which fairscale accepts; other values unchanged."""
    is_whole = isinstance(value, Real) and value % 1 == 0  # False for NaN and infinity.
    return int(value) if is_whole and not isinstance(value, bool) else value
