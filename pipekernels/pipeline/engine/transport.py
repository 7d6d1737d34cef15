"""Copies activations between stages' devices, chooses the streams on which stages compute, and
passes skips from stage to stage, and their gradients back.

A stage computes on the stream that was its device's current one in the forward, so a device runs
its stages in the order of issue, and the caller needs no synchronisation before or after. The run
keeps these streams, because its backward may be called from another thread, of autograd or of the
user, with other current streams. Copies have their own streams (``device/channel.py``): a copy is
issued right after the stage that made its source, and the receiving stage waits for it before it
runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipekernels._torch_private import is_profiler_enabled
from pipekernels.device import streams
from pipekernels.device.channel import Channel, PendingCopy, channel, settle_all
from pipekernels.device.profiling import in_profile
from pipekernels.device.streams import Stream
from pipekernels.pipeline.context import NOTHING
from pipekernels.pipeline.microbatch import Activation
from pipekernels.pipeline.skip import Key, SkipRoutes
from pipekernels.pipeline.timeline import Mark, clock

Receiver = tuple[int, int, bool]
"""The action that uses a copy: its stage (-1: the caller), microbatch, and whether a backward."""


class Transport:
    """Moves tensors of one run between devices. ``devices``: of the stages that have streams."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams: dict[torch.device, Stream] = {
            device: streams.current(device) for device in devices
        }
        # Copies that their receivers have not waited for yet.
        self.pending: dict[Receiver, list[PendingCopy]] = {}
        self._channels: dict[tuple[torch.device, torch.device, bool], Channel] = {}
        # If no backward is run, the graph keeps received buffers until it is freed: settle then.
        if devices:
            weakref.finalize(self, settle_all).atexit = False

    def clock(self, device: torch.device) -> Callable[[], Mark]:
        """A clock for the work of stages on ``device``."""
        stream: Any = self._streams.get(device)
        return clock(stream)

    @contextmanager
    def phase(self) -> Iterator[None]:
        """A context for a forward or backward, in which the stages' streams are current. Its work
        waits for earlier work on the caller's current streams; later work there waits for it."""
        callers = streams.currents(self._streams)
        for device, stream in self._streams.items():
            _follow(stream, streams.current(device))
        try:
            # Reversed, so that the first stage's device becomes the current one.
            streams.make_current(reversed(self._streams.values()))
            yield
        finally:
            self._settle()
            self.pending.clear()
            streams.make_current(callers)
            for device, stream in self._streams.items():
                _follow(streams.current(device), stream)
                # For gradients on another device than their node's, autograd waits for the default
                # stream there (until torch 2.8; since then for the current one).
                _follow(streams.default(device), stream)

    def send(
        self, tensors: Sequence[Tensor | None], targets: Sequence[torch.device], receiver: Receiver
    ) -> tuple[Any, ...]:
        """Issue copies of each tensor to its target, after the work that its device's current
        stream has been given. The copies may be read after :meth:`receive`. Tensors that are on
        their target already, and None, are returned as they are."""
        # One transfer per pair of devices, however many tensors take it.
        result = list(tensors)
        routes: dict[tuple[torch.device, torch.device], list[int]] = {}
        for i, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if tensor is not None and tensor.device != target:
                routes.setdefault((tensor.device, target), []).append(i)
        for route, indices in routes.items():
            key = (*route, receiver[2])
            used = self._channels.get(key) or self._channels.setdefault(key, channel(*key))
            # Asked here already, which saves each transfer a call of Python.
            profiled = is_profiler_enabled()
            with in_profile("copy from %s to %s", *route) if profiled else NOTHING:
                copies, pending = used.send([tensors[i] for i in indices])  # type: ignore[misc]
            self.pending.setdefault(receiver, []).append(pending)
            for i, copy in zip(indices, copies, strict=True):
                result[i] = copy
        return tuple(result)

    def receive(self, receiver: Receiver) -> None:
        """Make ``receiver`` wait for all copies sent to it; it must call this before it reads."""
        for pending in self.pending.pop(receiver, ()):
            pending.wait()
        if not self._streams:  # Without a phase() that settles at its end.
            self._settle()

    def _settle(self) -> None:
        for used in self._channels.values():
            used.settle()
        self._channels.clear()


def _follow(later: Stream, earlier: Stream) -> None:
    if later != earlier:
        later.wait_event(earlier.record_event())


class SkipTable:
    """The skips of one mini-batch, and their gradients, from the stage that stashes them until the
    one that pops them. The stages in between run in between, so no synchronisation is needed."""

    def __init__(self, routes: SkipRoutes, devices: Sequence[torch.device]) -> None:
        self._routes = routes
        self._devices = devices
        # With their versions, of those that want a gradient, else None.
        self._skips: dict[tuple[Key, int], tuple[torch.Tensor, int | None]] = {}
        # Devices of skips before they were copied to another; their gradients are copied back.
        self._source_devices: dict[tuple[Key, int], torch.device] = {}
        self.grads: dict[tuple[Key, int], torch.Tensor | None] = {}  # Sent by a backward.

    def leave(self, value: Activation, m: int, transport: Transport) -> Activation:
        """Keep the skips of ``value``, of microbatch ``m``, for the stages that pop them; returns
        it without them."""
        n = len(value.tensors) - len(value.skips)
        rest = zip(value.skips, value.tensors[n:], value.wants_grad[n:], strict=True)
        for key, skip, wants in rest:
            # The copy is waited for together with the inputs of the stage that pops it.
            receiver = self._routes.receiver[key]
            device = self._devices[receiver]
            if skip.device != device:
                self._source_devices[key, m] = skip.device
                (skip,) = transport.send([skip], [device], (receiver, m, False))
            self._skips[key, m] = skip, skip._version if wants else None
        return Activation(value.tensors[:n], value.wants_grad[:n], value.structure)

    def take(self, value: Activation, keys: Sequence[Key], m: int) -> Activation:
        """``value``, of microbatch ``m``, with the skips for ``keys``; those that are None are left
        out.

        Raises:
            RuntimeError: a skip that wants a gradient has been modified in place.
        """
        found = {key: self._skips.pop((key, m)) for key in keys if (key, m) in self._skips}
        for key, (skip, version) in found.items():
            if version is not None and skip._version != version:
                raise RuntimeError(
                    f"the skip {key[1]!r} was modified in place by a stage between those that "
                    "stash and pop it, so its gradient cannot be computed; stash a copy, or use "
                    "layers that do not work in place"
                )
        tensors = (*value.tensors, *[skip for skip, _ in found.values()])
        wants_grad = (*value.wants_grad, *[version is not None for _, version in found.values()])
        return Activation(tensors, wants_grad, value.structure, tuple(found), value.sources)

    def leave_grads(
        self, grads: Mapping[Key, torch.Tensor | None], m: int, transport: Transport
    ) -> None:
        """Keep the gradients of skips for the stages that stashed them."""
        for key, grad in grads.items():
            device = self._source_devices.get((key, m))
            if device is not None:
                (grad,) = transport.send([grad], [device], (self._routes.sender[key], m, True))
            self.grads[key, m] = grad

    def take_grads(self, keys: Sequence[Key], m: int) -> list[torch.Tensor | None]:
        """The gradients of ``keys``, None for a skip without one."""
        return [self.grads.pop((key, m), None) for key in keys]


STILL = Transport(())
"""Moves nothing: of mini-batches on one device without streams."""

NO_SKIPS = SkipTable(SkipRoutes(()), ())
