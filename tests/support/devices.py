"""Ranks on a device: as on the CPU, but in a CUDA stream of their own, and with its end waited for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipekernels import Communicator


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream of this thread's own; on a CPU nothing.

    On CUDA a backward runs on the thread that calls it, too: on autograd's one thread for the device,
    what one rank does could wait for what another one is to do there after it.
    """
    if device.type == "cpu":
        yield
        return
    with (
        torch.cuda.stream(torch.cuda.Stream(device)),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def on(device: torch.device, body: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """``body(communicator, *args)`` for a rank on ``device``, a thread or a process.

    Its communicator is as usable at its end as it was. Picklable if ``body`` is. Arguments that a call
    has besides the communicator come last.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # What has been made for ``body`` is there in every stream.
    return functools.partial(_run, device, body, args)


def _run(
    device: torch.device,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    communicator: Communicator,
    *more: Any,
) -> Any:
    with own_stream(device):
        result = body(communicator, *args, *more)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
            communicator.synchronize()  # Raises what went wrong on the device.
    return result
