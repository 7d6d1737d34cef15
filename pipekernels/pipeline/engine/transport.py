"""What goes from stage to stage where stages are on several devices, and on which streams they
compute.

A stage computes on the stream that was its device's current one in the forward, so a device does
its stages' work in the order of issue, and what the caller does before and after needs no
synchronisation. The run keeps these streams: a backward may be called from another thread, of
autograd or of the user, whose current streams are others. Copies have streams of their own
(``device/edge.py``); one begins when the stage that made its source has been issued, and the stage
that takes it waits for it when its own turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipekernels.device import streams
from pipekernels.device.edge import Arrival, Edge, edge, settle_all
from pipekernels.device.restoring import at_end, restoring
from pipekernels.device.streams import Stream
from pipekernels.pipeline.schedule.timeline import Clock, HostClock, StreamClock


class Receiver(NamedTuple):
    """Who uses what is sent: an action's stage, -1 for the caller, and micro-batch."""

    stage: int
    micro_batch: int
    backward: bool = False


class Transport:
    """Moves the tensors of one run between devices.

    Args:
        devices: those of the stages' that have streams.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams: dict[torch.device, Stream] = {
            device: streams.current(device) for device in devices
        }
        self.arrivals: dict[Receiver, list[Arrival]] = {}
        """What is on its way."""
        self._edges: set[Edge] = set()
        # Where a forward's backward never comes, its graph keeps received buffers until then.
        self._at_end = at_end(settle_all) if devices else None

    def stream(self, device: torch.device) -> Stream:
        """The stream that stages on ``device`` compute on."""
        return self._streams.get(device, streams.HOST)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Compute on ``device`` in the body."""
        return streams.using(self.stream(device))

    def clock(self, device: torch.device) -> Clock:
        """Tells when stages on ``device`` do their work."""
        stream = self.stream(device)
        return HostClock() if stream is streams.HOST else StreamClock(stream)  # type: ignore[arg-type]

    @contextmanager
    def phase(self) -> Iterator[None]:
        """A forward or a backward of the run: behind what the caller's current streams have been
        given, and before what they are given afterwards."""
        callers = streams.currents(self._streams)
        for device, stream in self._streams.items():
            _follow(stream, streams.current(device))

        def leave() -> None:
            self._settle()
            self.arrivals.clear()
            streams.make_current(callers)
            for device, stream in self._streams.items():
                _follow(streams.current(device), stream)
                # Autograd takes it that gradients on another device than their node's were made on
                # the default stream there (until torch 2.8; on the current one since).
                _follow(streams.default(device), stream)

        with restoring(leave):
            # The first stage's device is the current one in the end.
            streams.make_current(reversed(self._streams.values()))
            yield

    def send(
        self,
        tensors: Sequence[Tensor | None],
        targets: Sequence[torch.device],
        receiver: Receiver,
    ) -> tuple[Any, ...]:
        """Begin to copy each tensor to its target, behind what its device's current stream has been
        given; :meth:`receive` gives the copies' values. What is in its place, and None, stays."""
        result = list(tensors)
        ways: dict[tuple[torch.device, torch.device], list[int]] = {}
        for i, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if tensor is not None and tensor.device != target:
                ways.setdefault((tensor.device, target), []).append(i)
        for way, indices in ways.items():
            used = edge(*way, backward=receiver.backward)
            copies, arrival = used.send([tensors[i] for i in indices])  # type: ignore[misc]
            self._edges.add(used)
            self.arrivals.setdefault(receiver, []).append(arrival)
            for i, copy in zip(indices, copies, strict=True):
                result[i] = copy
        return tuple(result)

    def receive(self, receiver: Receiver) -> None:
        """Wait for all that was sent to ``receiver``: to be called before it uses any of it."""
        for arrival in self.arrivals.pop(receiver, ()):
            arrival.wait()
        if not self._streams:
            self._settle()

    def _settle(self) -> None:
        for used in self._edges:
            used.settle()
        self._edges.clear()


def _follow(later: Stream, earlier: Stream) -> None:
    if later != earlier:
        later.wait_event(earlier.record_event())
