"""Arguments that are whole numbers."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def integer(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int; one of NumPy or a tensor counts, and so does 4.0; a bool does not.

    Args:
        name: what an error calls it.
        value: the argument.
        least: the smallest that will do.

    Raises:
        ValueError: it is no such number.
    """
    number: int | None = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            is_whole = isinstance(value, Real) and value % 1 == 0  # NaN and infinity are not.
            number = int(value) if is_whole else None
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
