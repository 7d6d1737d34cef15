"""What orders work on a device whose operations return before they are done: streams and events.

The CPU, like ``meta``, needs neither: its work is done when the call returns. ``HOST`` stands for
it, so that the same code runs everywhere. A stream has ``record_event()`` and
``wait_event(event)``, an event has ``wait(stream)`` and ``synchronize()``, as torch's own have.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from pipekernels._backend import require_cuda_devices


class Event(Protocol):
    """A point in a stream."""

    def wait(self, stream: Any) -> None:
        """Have all that ``stream`` is given from now on wait for the point."""

    def synchronize(self) -> None:
        """Have the calling thread wait for it."""


class Stream(Protocol):
    """Work in the order in which it is issued."""

    def record_event(self) -> Event:
        """The point after all that has been issued."""

    def wait_event(self, event: Any) -> None:
        """Have all that is issued from now on wait for ``event``."""


class _Done:
    """A point that is always reached."""

    def wait(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Host:
    """The stream of a device that works while the caller waits."""

    def record_event(self) -> Event:
        return DONE

    def wait_event(self, event: Any) -> None:
        event.synchronize()


DONE: Event = _Done()
HOST: Stream = _Host()


def with_index(device: torch.device | str | int) -> torch.device:
    """``device`` as a tensor there names it: ``"cuda"`` is the current CUDA device, where there is
    one.

    Raises:
        TypeError: it is neither a device, nor a string, nor an index.
    """
    if not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"a device must be a torch.device, a string or an index, got {type(device).__name__}"
        )
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def usable(device: torch.device | str | int) -> torch.device:
    """``device`` as a tensor there names it.

    Raises:
        TypeError: it is neither a device, nor a string, nor an index.
        RuntimeError: torch knows no device of that name, or cannot use it.
    """
    if isinstance(device, int) and not torch.accelerator.is_available():
        require(device)  # Indices are then of CUDA devices, or of nothing that torch knows.
    found = with_index(device)
    if found.type == "cuda":
        require(device, found.index)
    return found


def require(device: torch.device | str | int, index: int | None = None) -> None:
    """Raise RuntimeError unless torch can use ``device``, the CUDA device of that index."""
    try:
        require_cuda_devices()
    except RuntimeError as error:
        raise RuntimeError(
            f"device {str(device)!r} cannot be used: {error}; or name the CPU, 'cpu'"
        ) from None
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise RuntimeError(
            f"device {str(device)!r} cannot be used: torch sees {count} CUDA devices, from cuda:0 "
            f"to cuda:{count - 1}; name one of them, or see CUDA_VISIBLE_DEVICES"
        )


def has_streams(device: torch.device) -> bool:
    """Whether operations on ``device`` return before they are done."""
    return device.type == "cuda"


def current(device: torch.device) -> Stream:
    """The stream that the calling thread's operations on ``device`` go to."""
    return torch.cuda.current_stream(device) if has_streams(device) else HOST


def default(device: torch.device) -> Stream:
    """The stream of those who chose none."""
    return torch.cuda.default_stream(device) if has_streams(device) else HOST


def currents(devices: Iterable[torch.device]) -> list[Stream]:
    """The current streams of those of ``devices`` that have some, and last that of the current
    device."""
    found = [stream for stream in map(current, devices) if stream is not HOST]
    return [*found, torch.cuda.current_stream()] if found else []


def make_current(found: Iterable[Any]) -> None:
    """Make each of these streams the current one of its device, and that the current device."""
    for stream in found:
        if stream is not HOST:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)


def new(device: torch.device) -> Stream:
    """Another stream of ``device``. RuntimeError if torch cannot use its kind."""
    if not has_streams(device):
        return HOST
    require_cuda_devices()
    return torch.cuda.Stream(device)


def using(stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` the current one of its device, and that the current device."""
    return nullcontext() if stream is HOST else torch.cuda.stream(stream)  # type: ignore[arg-type]
