"""Ranges that torch.profiler, or NVTX through it, shows while it watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from pipekernels import _backend
from pipekernels._torch_private import is_profiler_enabled


def in_profile(text: str, *arguments: object) -> AbstractContextManager[Any]:
    """A range named ``pipekernels::`` and ``text % arguments``, if the calling thread's work is
    profiled."""
    if not is_profiler_enabled():
        return nullcontext()
    return record_function(f"pipekernels::{text % arguments}")


def collective_in_profile(text: str, *arguments: object) -> AbstractContextManager[Any]:
    """:func:`in_profile` for a collective, whose waits for peers are ranges within it if they take
    longer than some 10 us."""
    if not is_profiler_enabled():
        return nullcontext()
    return _with_waits(f"pipekernels::{text % arguments}")


@contextmanager
def waits_for_peers() -> Iterator[list[tuple[float, float]]]:
    """Yield a list that receives start and end of each wait for peers by this thread's collectives
    on the CPU that takes longer than some 10 us; seconds of ``time.perf_counter``."""
    waits: list[tuple[float, float]] = []
    begun = 0.0

    def note(begins: bool) -> None:
        nonlocal begun
        if begins:
            begun = time.perf_counter()
        else:
            waits.append((begun, time.perf_counter()))

    with _waits_told_to(note):
        yield waits


@contextmanager
def _with_waits(name: str) -> Iterator[None]:
    shown: Any = None

    def show(begins: bool) -> None:
        nonlocal shown
        if begins:
            shown = record_function("pipekernels::wait for peers")
            shown.__enter__()
        else:
            shown.__exit__(None, None, None)

    with _waits_told_to(show), record_function(name):
        yield


@contextmanager
def _waits_told_to(observer: Callable[[bool], None]) -> Iterator[None]:
    """Call ``observer(begins)`` at both ends of waits, after the one that is told already."""
    watch_waits = _backend.load().watch_waits
    outer = watch_waits(None)

    def both(begins: bool) -> None:
        if outer is not None:
            outer(begins)
        observer(begins)

    watch_waits(both)
    try:
        yield
    finally:
        watch_waits(outer)
