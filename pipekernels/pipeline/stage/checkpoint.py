"""Activation checkpointing (Chen et al., 2016): which micro-batches are recomputed, and whether a
checkpointed forward or a recomputation runs now."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

MODES = ("always", "except_last", "never")


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether the calling thread runs a stage's forward whose activations are dropped."""
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether the calling thread recomputes a stage's forward, as part of the backward."""
    return _phase.recomputing


def checkpointed(mode: str, micro_batches: int) -> list[bool]:
    """Whether ``mode`` drops the activations of each micro-batch. ``micro_batches`` is the actual
    number of them, which may be less than ``chunks``."""
    is_last_kept = mode == "except_last"
    return [mode != "never"] * (micro_batches - is_last_kept) + [False] * is_last_kept


@contextmanager
def _marked(phase: str) -> Iterator[None]:
    before = getattr(_phase, phase)
    try:
        setattr(_phase, phase, True)
        yield
    finally:
        setattr(_phase, phase, before)


checkpointing = partial(_marked, "checkpointing")
"""Context that marks the calling thread's forward as a checkpointed one."""

recomputing = partial(_marked, "recomputing")
"""Context that marks the calling thread's forward as a recomputation."""
