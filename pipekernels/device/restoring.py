"""Temporary changes to the process, a thread or a model that are undone even if Ctrl-C interrupts.

KeyboardInterrupt can be raised after any call: between the change made by an ``__enter__`` and the
body of its ``with``, or at the start of an ``__exit__`` that has done nothing yet. Nested context
managers alone then lose changes (https://github.com/python/cpython/issues/74174). Here every change
is listed per thread until it is undone (:class:`restoring`). When an exception leaves a function
decorated with :func:`restore_despite_interrupt`, the decorator undoes the changes still listed and
resets torch's per-thread state.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from pipekernels._torch_private import (
    device_setting,
    function_modes,
    function_modes_state,
    set_device_setting,
    set_function_modes,
    set_function_modes_state,
)

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class _Changes(threading.local):
    def __init__(self) -> None:
        self.made: list[restoring] = []


_changes = _Changes()


class restoring:
    """Calls ``put_back`` at the end of the body. The body makes the change.

    Args:
        put_back: undoes the change, even one made in part. If Ctrl-C interrupts it, it is called
            again.
    """

    def __init__(self, put_back: Callable[[], object]) -> None:
        self.put_back = put_back

    def __enter__(self) -> Any:
        _changes.made.append(self)

    def __exit__(self, *error: object) -> None:
        made = _changes.made
        if made and made[-1] is self:  # Almost always.
            self.put_back()
            del made[-1]
        elif self in made:
            _take_back(made, made.index(self))


class holding(restoring):
    """Holds ``lock`` in the body. ``with lock`` is not enough: in Python 3.14 Ctrl-C may interrupt
    between a context manager written in C and its body
    (https://github.com/python/cpython/issues/148874)."""

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(self._release)
        self._lock: Any = lock
        self._asked = False

    # KeyboardInterrupt is raised after a call, never before it, so the flag is set if and only if
    # the next line is reached.

    def __enter__(self) -> None:
        super().__enter__()
        self._asked = True
        self._lock.acquire()

    def _release(self) -> None:
        if self._asked and self._lock._is_owned():  # Not if interrupted while waiting.
            self._asked = False
            self._lock.release()


def _take_back(made: list[restoring], left: int) -> None:
    """Undo all changes but the first ``left``, the latest first."""
    while len(made) > left:
        made[-1].put_back()
        del made[-1]


class FunctionModes:
    """Snapshot of the calling thread's ``TorchFunctionMode`` stack, whether it is enabled, and the
    default device."""

    def __init__(self) -> None:
        self._state = function_modes_state()
        self._modes = function_modes()
        self._device = device_setting()

    def put_back(self) -> None:
        set_function_modes_state(self._state)
        set_device_setting(self._device)
        now = function_modes()
        if len(now) != len(self._modes) or not all(map(_is, now, self._modes)):
            set_function_modes(self._modes)


def _is(one: object, other: object) -> bool:
    return one is other


class entered(restoring, Generic[T]):
    """As ``with mode``, for a function mode or default device, but restores the whole stack of
    modes instead of popping the last: torch pops a mode while it runs the mode's Python code, so
    after an interrupt there the last one would be another."""

    def __init__(self, mode: AbstractContextManager[T]) -> None:
        super().__init__(FunctionModes().put_back)
        self._mode = mode

    def __enter__(self) -> T:
        super().__enter__()
        return self._mode.__enter__()


class Autocast(NamedTuple):
    """Autocast settings of a thread."""

    on_cpu: bool
    on_cuda: bool
    cpu_dtype: torch.dtype
    cuda_dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls) -> Autocast:
        """Those of the calling thread."""
        return cls(
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
        )

    def set(self) -> None:
        """Apply them to the calling thread."""
        torch.set_autocast_enabled("cpu", self.on_cpu)
        torch.set_autocast_enabled("cuda", self.on_cuda)
        torch.set_autocast_dtype("cpu", self.cpu_dtype)
        torch.set_autocast_dtype("cuda", self.cuda_dtype)
        torch.set_autocast_cache_enabled(self.caches)


class _Nesting:
    """One level of nested autocasts. torch clears its cache of casts at the end of the outermost
    one."""

    def __init__(self) -> None:
        self._inside = False  # Set if and only if the call was made, as in `holding`.

    def enter(self) -> None:
        self._inside = True
        torch.autocast_increment_nesting()

    def leave(self) -> None:
        if self._inside:
            self._inside = False
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def autocast_as(wanted: Autocast) -> AbstractContextManager[None]:
    """Apply ``wanted`` to the calling thread in the body."""
    before = Autocast.now()
    return nullcontext() if wanted == before else _changed_autocast(before, wanted)


@contextmanager
def _changed_autocast(before: Autocast, wanted: Autocast) -> Iterator[None]:
    nesting = _Nesting()
    with restoring(nesting.leave), restoring(before.set):
        nesting.enter()
        wanted.set()
        yield


def at_end(work: Callable[[], object]) -> Iterator[None]:
    """Return an object that calls ``work`` when it is destroyed. Ctrl-C during ``work`` is not
    lost, as it would be in a ``__del__``, where Python only prints it: ``work`` is called again,
    and the interrupt is then raised in the main thread.
    """
    # A generator, because closing it resumes inside its `try`: Ctrl-C can be raised before the
    # first line of a function.
    generator = _call_at_end(work)
    next(generator)
    return generator


def _call_at_end(work: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            work()
        except KeyboardInterrupt:
            work()
            # From another thread: interrupt_main() called here would raise in this very place.
            _thread.start_new_thread(_thread.interrupt_main, ())


def _end_contexts(error: BaseException) -> None:
    """Close generators that ``error`` left suspended because it was raised in ``contextlib``'s own
    code. torch has context managers of this kind that restore a mode; they must do so now, not when
    the traceback is freed."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == contextlib.__file__:
            generator = getattr(frame.f_locals.get("self"), "gen", None)
            if generator is not None:
                with contextlib.suppress(Exception):  # Python would ignore it, too.
                    generator.close()
        trace = trace.tb_next


def restore_despite_interrupt(function: Function) -> Function:
    """Decorate ``function`` so that an exception leaves it only after all its :class:`restoring`
    changes are undone and torch's function modes, grad mode and autocast are as at its start.
    Retry the restore if KeyboardInterrupt hits it, then re-raise."""

    @functools.wraps(function)
    def restores(*args: Any, **kwargs: Any) -> Any:
        made = _changes.made
        changes = len(made)
        modes, autocast, grad = FunctionModes(), Autocast.now(), torch.is_grad_enabled()

        def restore(error: BaseException) -> None:
            _end_contexts(error)
            _take_back(made, changes)
            modes.put_back()
            autocast.set()
            torch.set_grad_enabled(grad)

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
