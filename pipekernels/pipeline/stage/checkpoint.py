"""Activation checkpointing (Chen et al., 2016): whether a checkpointed forward, or a recomputation,
runs now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MODES = ("always", "except_last", "never")
"""Which micro-batches drop their activations."""

checkpointing = ContextVar("pipekernels_checkpointing", default=False)
"""Whether the calling thread's forward is a checkpointed one."""

recomputing = ContextVar("pipekernels_recomputing", default=False)
"""Whether the calling thread's forward is a recomputation."""


def is_checkpointing() -> bool:
    """Whether the calling thread runs a stage's forward whose activations are dropped."""
    return checkpointing.get()


def is_recomputing() -> bool:
    """Whether the calling thread recomputes a stage's forward, as part of the backward."""
    return recomputing.get()


@contextmanager
def during(phase: ContextVar[bool]) -> Iterator[None]:
    """Mark the body as ``phase``."""
    token = phase.set(True)
    try:
        yield
    finally:
        phase.reset(token)
