"""Ctrl-C leaves nothing behind, wherever it comes.

KeyboardInterrupt can be raised after any call: also at the start of an ``__exit__`` that has done
nothing yet, or in the middle of a clean-up. Context managers alone then lose changes
(https://github.com/python/cpython/issues/74174). So entries take a snapshot of their thread's
settings and locks (:func:`restore_despite_interrupt`), and :func:`restoring` undoes the rest.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from pipekernels import _torch_private as private

Function = TypeVar("Function", bound=Callable[..., Any])

Settings = Sequence[tuple[Callable[[], Any], Callable[[Any], object]]]
"""How to read and how to write each setting of the calling thread."""
AUTOCAST: Settings = (
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
_SETTINGS: Settings = (
    *AUTOCAST,
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (private.function_modes_state, private.set_function_modes_state),
    (private.device_setting, private.set_device_setting),
    (private.function_modes, private.set_function_modes),
)
LOCKS: list[Any] = []  # RLocks of the process that entries may acquire.


def _close_contexts(error: BaseException) -> None:
    """Close the generators that ``error`` left suspended, as it was raised in ``contextlib``'s own
    code: they must restore before the contexts around them, not when the traceback is freed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == contextlib.__file__:
            with contextlib.suppress(Exception):  # No generator, or an error in it.
                frame.f_locals["self"].gen.close()


@contextmanager
def restoring(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Call ``undo`` at the end of the body, which makes the change; again if it is interrupted."""
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
    """Decorate an entry. ``locks`` gets its arguments and returns the RLocks that it acquires:
    Ctrl-C may come before the body of their ``with`` (github.com/python/cpython/issues/148874)."""

    @wraps(function)
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
