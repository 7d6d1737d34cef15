"""Copies activations between stages' devices, and chooses the streams on which stages compute.

A stage computes on the stream that was its device's current one in the forward, so a device runs
its stages in the order of issue, and the caller needs no synchronisation before or after. The run
keeps these streams, because its backward may be called from another thread, of autograd or of the
user, with other current streams. Copies have their own streams (``device/edge.py``): a copy is
issued right after the stage that made its source, and the receiving stage waits for it before it
runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipekernels.device import streams
from pipekernels.device.edge import Arrival, Edge, edge, settle_all
from pipekernels.device.profiling import in_profile
from pipekernels.device.streams import Stream
from pipekernels.pipeline.schedule.timeline import Mark, clock

Receiver = tuple[int, int, bool]
"""The action that uses a copy: its stage (-1: the caller), micro-batch, and whether a backward."""


class Transport:
    """Moves tensors of one run between devices; ``devices`` are those of stages with streams."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams: dict[torch.device, Stream] = {
            device: streams.current(device) for device in devices
        }
        # Copies that their receivers have not waited for yet.
        self.arrivals: dict[Receiver, list[Arrival]] = {}
        self._edges: dict[tuple[torch.device, torch.device, bool], Edge] = {}
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
            self.arrivals.clear()
            streams.make_current(callers)
            for device, stream in self._streams.items():
                _follow(streams.current(device), stream)
                # For gradients on another device than their node's, autograd waits for the default
                # stream there (until torch 2.8; since then for the current one).
                _follow(streams.default(device), stream)

    def send(
        self,
        tensors: Sequence[Tensor | None],
        targets: Sequence[torch.device],
        receiver: Receiver,
    ) -> tuple[Any, ...]:
        """Issue copies of each tensor to its target, after the work that its device's current
        stream has been given. The copies may be read after :meth:`receive`. Tensors that are on
        their target already, and None, are returned as they are."""
        result = list(tensors)
        routes: dict[tuple[torch.device, torch.device], list[int]] = {}
        for i, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if tensor is not None and tensor.device != target:
                routes.setdefault((tensor.device, target), []).append(i)
        for route, indices in routes.items():
            key = (*route, receiver[2])
            used = self._edges.get(key) or self._edges.setdefault(key, edge(*key))
            with in_profile("copy from %s to %s", *route):
                copies, arrival = used.send([tensors[i] for i in indices])  # type: ignore[misc]
            self.arrivals.setdefault(receiver, []).append(arrival)
            for i, copy in zip(indices, copies, strict=True):
                result[i] = copy
        return tuple(result)

    def receive(self, receiver: Receiver) -> None:
        """Make ``receiver`` wait for all copies sent to it; it must call this before it reads."""
        for arrival in self.arrivals.pop(receiver, ()):
            arrival.wait()
        if not self._streams:
            self._settle()

    def _settle(self) -> None:
        for used in self._edges.values():
            used.settle()
        self._edges.clear()


def _follow(later: Stream, earlier: Stream) -> None:
    if later != earlier:
        later.wait_event(earlier.record_event())
