"""Autocast of the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

_SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
"""How to read and how to write each setting of the calling thread."""


def settings() -> list[Any]:
    """The thread's settings, for :func:`autocast_as`."""
    return [read() for read, _ in _SETTINGS]


def autocast_as(wanted: Sequence[Any]) -> AbstractContextManager[None]:
    """Apply ``wanted`` to the thread in the body."""
    before = settings()
    return nullcontext() if wanted == before else _changed(before, wanted)


def _set(values: Sequence[Any]) -> None:
    for (_, write), value in zip(_SETTINGS, values, strict=True):
        write(value)


@contextmanager
def _changed(before: Sequence[Any], wanted: Sequence[Any]) -> Iterator[None]:
    torch.autocast_increment_nesting()
    try:
        _set(wanted)
        yield
    finally:
        _set(before)
        if torch.autocast_decrement_nesting() == 0:  # The outermost: drop casts of weights.
            torch.clear_autocast_cache()


def cast_cache(enabled: bool) -> AbstractContextManager[None]:
    """Turn autocast's cache of cast parameters on or off in the body."""
    # Uses of a parameter that share one cast sum their gradients in its dtype, if one autograd call
    # covers them. The cache is process-wide, and a worker that leaves autocast empties it for all.
    # So which uses share a cast would depend on the execution and on timing.
    return autocast_as([*settings()[:-1], enabled])
