"""Ranges that torch.profiler, or NVTX through it, shows while it watches."""

from __future__ import annotations

from collections.abc import Iterator
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
def _with_waits(name: str) -> Iterator[None]:
    watch_waits = _backend.load().watch_waits
    watch_waits(_WaitRange())
    try:
        with record_function(name):
            yield
    finally:
        watch_waits(None)


class _WaitRange:
    """The range of a wait, which native code begins and ends."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def __call__(self, begins: bool) -> None:
        if begins:
            self._range = record_function("pipekernels::wait for peers").__enter__()
        elif self._range is not None:
            self._range.__exit__(None, None, None)
