"""Runs ranks on a device; on CUDA each in a stream of its own, synchronized at the end."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipekernels import Communicator


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current in this thread; does nothing for the CPU.

    On CUDA, backwards also run on the calling thread. All ranks of a device would otherwise share
    autograd's one thread for it, and could deadlock: one rank's backward waits for a peer's, which
    that thread runs only afterwards.
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
    """A function that a rank on ``device`` calls: ``body(communicator, *args, *further
    arguments)``.

    It raises if the communicator has failed on the device. It can be pickled if ``body`` can.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # Tensors made for ``body`` are then ready in every stream.
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
            communicator.synchronize()  # Raises errors of the device.
    return result
