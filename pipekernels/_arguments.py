"""Arguments that are whole numbers."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int; one of NumPy or a tensor counts, a bool or a float does not.

    Args:
        name: what an error calls it.
        value: the argument.
        least: the smallest that will do.

    Raises:
        ValueError: it is no such number.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return number


def check_integer(name: str, value: Any) -> None:
    """Whether ``value``, which an error calls ``name``, is an integer, also one of NumPy; TypeError
    if not."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def whole(value: Any) -> Any:
    """An int for a number such as 4.0, which fairscale takes; all else as it is."""
    is_whole = isinstance(value, Real) and value % 1 == 0  # NaN and infinity are not.
    return int(value) if is_whole and not isinstance(value, bool) else value
