"""Streams of devices that have them, and ``HOST`` for those whose operations are done when the call
returns: the CPU and ``meta``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipekernels._torch_private import current_raw_stream

Stream = Any
"""A ``torch.cuda.Stream``, or ``HOST``."""
HOST: Stream = None


def with_index(device: torch.device | str | int) -> torch.device:
    """``device`` as a ``torch.device``; ``"cuda"`` gets the current CUDA device's index, if any."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def usable(device: torch.device | str | int) -> torch.device:
    """As :func:`with_index`; RuntimeError for a device that torch cannot use."""
    found = with_index(device)
    try:
        torch.empty(0, device=found)
    except Exception as error:  # noqa: BLE001 (Which one depends on the device.)
        raise RuntimeError(
            f"device {str(device)!r} cannot be used: {error}; name another, such as 'cpu'"
        ) from None
    return found


def has_streams(device: torch.device) -> bool:
    """Whether operations on ``device`` are asynchronous."""
    return device.type == "cuda"


def current(device: torch.device) -> Stream:
    """The stream of the calling thread's operations on ``device``."""
    return torch.cuda.current_stream(device) if has_streams(device) else HOST


def default(device: torch.device) -> Stream:
    """The default stream of ``device``."""
    return torch.cuda.default_stream(device) if has_streams(device) else HOST


def currents(devices: Iterable[torch.device]) -> list[Stream]:
    """Current streams of the ``devices`` that have streams; then, if any, the current device's."""
    found = [stream for stream in map(current, devices) if stream is not HOST]
    return [*found, torch.cuda.current_stream()] if found else []


def make_current(found: Iterable[Stream]) -> None:
    """Make each stream the current one of its device, and the last one's device the current one."""
    for stream in found:
        if stream is not HOST:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)


def make_device_current(device: torch.device) -> None:
    """Make ``device`` the current CUDA device, if it is one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def external(device: torch.device, handle: int) -> Stream:
    """The stream of ``device`` that the extension knows by ``handle``."""
    if not has_streams(device):
        return HOST
    return torch.cuda.ExternalStream(handle, device=device)


def current_handle(device: torch.device) -> int:
    """The number by which the extension knows :func:`current`; also 0 for the CPU."""
    if device.type != "cuda":
        return 0
    assert current_raw_stream is not None
    return int(current_raw_stream(device.index))


def empty_like(tensors: Iterable[Tensor], device: torch.device, stream: Stream) -> list[Tensor]:
    """``torch.empty_like`` of each tensor on ``device``, in memory of ``stream``. As with
    :func:`using`, but in fewer steps, each of which takes longer than an allocation."""
    before, current_device = torch.cuda.current_stream(device), torch.cuda.current_device()
    try:
        torch.cuda.set_stream(stream)
        return [torch.empty_like(tensor, device=device) for tensor in tensors]
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(current_device)


def using(stream: Stream) -> AbstractContextManager[Any]:
    """A context in which ``stream`` and its device are current."""
    return nullcontext() if stream is HOST else torch.cuda.stream(stream)
