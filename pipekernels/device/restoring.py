"""Ctrl-C leaves nothing behind, wherever it comes.

KeyboardInterrupt can be raised after any call: also at the start of an ``__exit__`` that has done
nothing yet, or in the middle of a clean-up. Context managers alone then lose changes
(https://github.com/python/cpython/issues/74174). So an entry (:func:`restore_despite_interrupt`)
takes a snapshot of its thread's settings and locks, and restores it if an exception leaves it; and
what takes several calls to undo is undone by :func:`restoring`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pipekernels import _torch_private as private
from pipekernels.device import autocast

Function = TypeVar("Function", bound=Callable[..., Any])

_SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    *autocast.SETTINGS,
    (autocast.depth, autocast.leave),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (private.function_modes_state, private.set_function_modes_state),
    (private.device_setting, private.set_device_setting),
    (private.function_modes, private.set_function_modes),
)
LOCKS: list[Any] = []
"""RLocks of the process that entries may hold at times."""


def _close_contexts(error: BaseException) -> None:
    """Close the generators that ``error`` left suspended, as it was raised in ``contextlib``'s own
    code: they must restore before the contexts around them, not when the traceback is freed."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == contextlib.__file__:
            generator = getattr(trace.tb_frame.f_locals.get("self"), "gen", None)
            if generator is not None:
                with contextlib.suppress(Exception):  # Python would ignore it, too.
                    generator.close()
        trace = trace.tb_next


@contextmanager
def restoring(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Call ``undo`` at the end of the body, which makes the change, perhaps not or in part; call it
    again if Ctrl-C interrupts it."""
    try:
        yield
    except BaseException as error:
        _close_contexts(error)
        raise
    finally:  # Not in a function, which may be interrupted before its first line.
        try:
            undo()
        except BaseException:
            undo()
            raise


def restore_despite_interrupt(
    function: Function, *, locks: Callable[..., Iterable[Any]] = lambda *_, **__: ()
) -> Function:
    """Decorate an entry. ``locks`` gets its arguments and returns the RLocks that it acquires: in
    Python 3.14 Ctrl-C may come between ``with lock`` and its body
    (https://github.com/python/cpython/issues/148874)."""

    @functools.wraps(function)
    def restores(*args: Any, **kwargs: Any) -> Any:
        before = [read() for read, _ in _SETTINGS]
        free = [lock for lock in (*LOCKS, *locks(*args, **kwargs)) if not lock._is_owned()]

        def restore(error: BaseException) -> None:
            _close_contexts(error)
            for (read, write), value in zip(_SETTINGS, before, strict=True):
                if read() != value:
                    write(value)
            for lock in free:
                while lock._is_owned():
                    lock.release()

        try:
            return function(*args, **kwargs)
        except BaseException as error:
            try:
                restore(error)
            except BaseException:
                restore(error)
                raise
            raise

    return restores  # type: ignore[return-value]
