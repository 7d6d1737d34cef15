"""State of the calling thread: whether it recomputes, and what torch keeps for it, which is applied
on workers and in recomputations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from pipekernels._torch_private import DeviceContext, function_modes, has_saved_tensors_hooks
from pipekernels.device import autocast
from pipekernels.ops.dispatch import is_observed

Mode = Literal["always", "except_last", "never"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""Which microbatches drop their activations (activation checkpointing, Chen et al., 2016)."""

checkpointing = ContextVar("pipekernels_checkpointing", default=False)
"""Whether the calling thread's forward is a checkpointed one."""

recomputing = ContextVar("pipekernels_recomputing", default=False)
"""Whether the calling thread's forward is a recomputation."""


def is_checkpointing() -> bool:
    """Whether the calling thread runs a stage's forward whose activations are dropped."""
    return checkpointing.get()


def is_recomputing() -> bool:
    """Whether the calling thread recomputes a stage's forward, as part of the backward."""
    return recomputing.get()


@contextmanager
def during(phase: ContextVar[bool]) -> Iterator[None]:
    """Mark the body as ``phase``."""
    token = phase.set(True)
    try:
        yield
    finally:
        phase.reset(token)


class CallerContext:
    """Inference mode, autocast and default device of the thread that makes this object. Grad mode
    is left out: the engine sets it for every task."""

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = autocast.settings()
        device = default_device()
        self.default_device = None if device.type == "cpu" else device

    def applied(self) -> AbstractContextManager[None]:
        """Apply the state to the thread that runs the body."""
        inference = self.inference and not torch.is_inference_mode_enabled()
        device = self.default_device
        if inference or (device is not None and device != default_device()):
            return self._applied(inference)
        return autocast.autocast_as(self.autocast)

    @contextmanager
    def _applied(self, inference: bool) -> Iterator[None]:
        device = self.default_device
        with (
            torch.inference_mode() if inference else nullcontext(),
            nullcontext() if device is None else device,
            autocast.autocast_as(self.autocast),
        ):
            yield

    def without_autocast(self) -> AbstractContextManager[None]:
        """Turn autocast off in the body, which runs on the thread that made this object."""
        return autocast.autocast_as([False, False, *self.autocast[2:]])


def default_device() -> torch.device:
    """The calling thread's default device; ``torch.get_default_device()`` of torch 2.6 ignores
    ``with device:``."""
    for mode in reversed(function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


def needs_this_thread() -> bool:
    """Whether the calling thread has a dispatch or function mode, profiler or saved-tensor hooks,
    which would miss operations on other threads."""
    return (
        is_observed()
        # CallerContext carries the default device's mode to other threads.
        or any(not isinstance(mode, DeviceContext) for mode in function_modes())
        or has_saved_tensors_hooks()
    )
