"""State of the calling thread: whether it recomputes, torch's random numbers, and what torch keeps
for it, which is applied on workers and in recomputations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, get_args

import torch

from pipekernels._torch_private import (
    DeviceContext,
    dispatch_mode_count,
    function_mode_count,
    function_modes,
    is_profiler_enabled,
    saved_tensors_hooks,
)

NOTHING: AbstractContextManager[Any] = nullcontext()
"""A context that changes nothing."""

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


# ---- random numbers ----


def generators_of(devices: Sequence[torch.device]) -> list[torch.Generator]:
    """The default generators of the CPU and of ``devices``."""
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    if cuda:
        torch.cuda.init()  # torch creates the CUDA generators here.
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in cuda)]


@contextmanager
def preserved(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the states of ``generators`` after the body."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def draw_seed() -> int:
    """A number from the default CPU generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def seed_task(
    generators: Sequence[torch.Generator], base: int, stage: int, micro_batch: int
) -> int:
    """Seed ``generators`` for a task of the mini-batch that drew ``base``; returns the seed."""
    seed = base + stage * 0x9E3779B1 + micro_batch * 0x85EBCA77  # Odd strides: distinct seeds.
    for generator in generators:
        generator.manual_seed(seed)
    return seed


@contextmanager
def own_state(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """As :func:`preserved`, with autocast's cache of cast parameters off in the body."""
    # Uses of a parameter that share one cast sum their gradients in its dtype, if one autograd call
    # covers them. The cache is process-wide, and a worker that leaves autocast empties it for all.
    # So which uses share a cast would depend on the execution and on timing.
    before = torch.is_autocast_cache_enabled()
    states = [generator.get_state() for generator in generators]
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


# ---- autocast ----


_SETTINGS = (
    *(partial(torch.is_autocast_enabled, "cpu"), partial(torch.is_autocast_enabled, "cuda")),
    *(partial(torch.get_autocast_dtype, "cpu"), partial(torch.get_autocast_dtype, "cuda")),
    torch.is_autocast_cache_enabled,
)
"""They read the calling thread's settings of autocast."""


@contextmanager
def _autocast_as(settings: Sequence[Any]) -> Iterator[None]:
    cpu, cuda, cpu_dtype, cuda_dtype, caches = settings
    with (
        torch.autocast("cpu", cpu_dtype, cpu, caches),
        torch.autocast("cuda", cuda_dtype, cuda, caches),
    ):
        yield


# ---- all of it ----


class CallerContext:
    """Inference mode, autocast and default device of the thread that makes this object. Grad mode
    is left out: the engine sets it for every task."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [read() for read in _SETTINGS]
        device = default_device() if function_mode_count() else None
        self._default_device = None if device is None or device.type == "cpu" else device

    def applied(self) -> AbstractContextManager[None]:
        """Apply the state to the thread that runs the body."""
        inference = self._inference and not torch.is_inference_mode_enabled()
        device = self._default_device
        if inference or (device is not None and device != default_device()):
            return self._applied(inference)
        is_same = self._autocast == [read() for read in _SETTINGS]
        return NOTHING if is_same else _autocast_as(self._autocast)

    @contextmanager
    def _applied(self, inference: bool) -> Iterator[None]:
        device = self._default_device
        with (
            torch.inference_mode() if inference else NOTHING,
            NOTHING if device is None else device,
            _autocast_as(self._autocast),
        ):
            yield

    def without_autocast(self) -> AbstractContextManager[None]:
        """Turn autocast off in the body, which runs on the thread that made this object."""
        if not any(self._autocast[:2]):
            return NOTHING
        return _autocast_as([False, False, *self._autocast[2:]])


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
        dispatch_mode_count() > 0
        or is_profiler_enabled()
        # CallerContext carries the default device's mode to other threads.
        or (
            function_mode_count() > 0
            and not all(isinstance(mode, DeviceContext) for mode in function_modes())
        )
        or saved_tensors_hooks(True) is not None
    )
