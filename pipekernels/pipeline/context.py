"""State of the calling thread: whether it recomputes, torch's random numbers, and the settings that
a recomputation must find again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch

from pipekernels._torch_private import DeviceContext, function_modes

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
) -> None:
    """Seed ``generators`` for a task of the mini-batch that drew ``base``."""
    for generator in generators:  # Odd strides: distinct seeds.
        generator.manual_seed(base + stage * 0x9E3779B1 + micro_batch * 0x85EBCA77)


@contextmanager
def own_state(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """As :func:`preserved`, with autocast's cache of cast parameters off in the body."""
    # Uses of a parameter that share one cast sum their gradients in its dtype, if one autograd call
    # covers them. So the bits would depend on which stages run as one.
    before = torch.is_autocast_cache_enabled()
    states = [generator.get_state() for generator in generators]
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


# ---- settings ----


class Settings:
    """Autocast and the default device of the thread that makes this object, for a recomputation."""

    def __init__(self) -> None:
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        ]
        # torch.get_default_device() of torch 2.6 ignores `with device:`.
        devices = [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
        self._device: torch.device = devices[-1] if devices else torch.device("cpu")

    def applied(self) -> AbstractContextManager[None]:
        """Apply them to the calling thread in the body."""
        return NOTHING if vars(self) == vars(Settings()) else self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        cpu, cuda = [torch.autocast(*each) for each in self._autocast]
        with cpu, cuda, self._device:
            yield
