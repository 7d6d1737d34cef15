"""Ranks on a device: as on the CPU, but in a CUDA stream of their own, and with its end waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pipekernels import Communicator


def on(device: torch.device, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body(communicator, *args)`` for a rank on ``device``; picklable if ``body`` is."""
    return functools.partial(_run, device, body)


def _run(
    device: torch.device, body: Callable[..., Any], communicator: Communicator, *args: Any
) -> Any:
    if device.type == "cpu":
        return body(communicator, *args)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        result = body(communicator, *args)
        torch.cuda.current_stream().synchronize()
        communicator.synchronize()
    return result
