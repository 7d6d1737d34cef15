"""Autocast of the calling thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pipekernels.device.restoring import AUTOCAST, restoring


def settings() -> list[Any]:
    """The thread's settings, for :func:`autocast_as`."""
    return [read() for read, _ in AUTOCAST]


def autocast_as(wanted: Sequence[Any]) -> AbstractContextManager[None]:
    """Apply ``wanted`` to the thread in the body."""
    before = settings()
    return nullcontext() if wanted == before else _changed(before, wanted)


def _set(values: Sequence[Any]) -> None:
    for (_, write), value in zip(AUTOCAST, values, strict=True):
        write(value)


@contextmanager
def _changed(before: Sequence[Any], wanted: Sequence[Any]) -> Iterator[None]:
    inside = False  # True only if the next line is reached: Ctrl-C comes after a call, not before.

    def leave() -> None:
        nonlocal inside
        _set(before)
        if inside:
            inside = False
            if torch.autocast_decrement_nesting() == 0:  # The outermost: drop casts of weights.
                torch.clear_autocast_cache()

    with restoring(leave):
        inside = True
        torch.autocast_increment_nesting()
        _set(wanted)
        yield


@contextmanager
def cast_cache(enabled: bool) -> Iterator[None]:
    """Turn autocast's cache of cast parameters on or off in the body.

    Uses of a parameter that share one cast sum their gradients in its dtype, if one autograd call
    covers them. The cache is process-wide, and a lane that leaves autocast empties it for all
    lanes. So which uses share a cast would depend on the execution and on timing.
    """
    before = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(enabled)
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
