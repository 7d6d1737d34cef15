"""The compiled side of a channel (``pipekernels/device/channel.py``) on recorded streams.

It issues what ``csrc/cuda/p2p_copy/p2p_copy.cu`` issues, in the same streams and with the same
waits; ``csrc/tests/p2p_copy_test.cpp`` tests that file itself. Handles are the streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from support.cuda.recorded_streams import Agent, Machine, Point


class RecordedEvent:
    """The contract of ``P2PEvent``."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def wait(self, device: int, stream: Agent, /) -> bool:
        assert device == stream.device.index
        if stream.is_captured:
            return False
        for point in self.points:
            stream.wait_event(point)
        return True

    def synchronize(self) -> None:
        for point in self.points:
            point.synchronize()

    def is_done(self) -> bool:
        """Only what the thread has waited for is certainly done."""
        return all(point.has_passed() for point in self.points)


class _Slot:
    """Pinned memory that pieces of copies pass through."""

    def __init__(self, channel: RecordedChannel) -> None:
        with torch.inference_mode(False):
            self.memory = channel.machine.pinned_empty((channel.slot_bytes,), (1,), torch.uint8)
        self.free: Point | None = None


class RecordedChannel:
    """The contract of ``P2PChannel``.

    Args:
        peers: whether the source can write to the target's memory.
    """

    def __init__(
        self,
        machine: Machine,
        source: torch.device,
        target: torch.device,
        slot_bytes: int,
        peers: bool,
    ) -> None:
        self.machine = machine
        self.source, self.target = source, target
        self.slot_bytes = slot_bytes
        self.leaving, self.arriving = machine.new(source), machine.new(target)
        self.slots: list[_Slot] = []
        self._peers = peers

    def send(
        self,
        event: RecordedEvent,
        sources: list[Tensor],
        targets: list[Tensor],
        snapshots: list[Tensor],
        stream: Any,
        threads: int,
        /,
    ) -> bool:
        machine = self.machine
        assert len(sources) == len(targets) and len(snapshots) in (0, len(sources)) and threads > 0
        for source, target in zip(sources, targets, strict=True):
            assert machine.device_of(source) == self.source
            assert machine.device_of(target) == self.target
            assert source.shape == target.shape and source.dtype == target.dtype
            assert target.stride() == torch.empty_like(source).stride()
        if self.source.type != "cpu" and stream.is_captured:
            raise RuntimeError("copies between devices cannot be part of a CUDA graph")
        if self.source.type == "cpu":
            reads = False
            for source, target in zip(sources, targets, strict=True):
                if machine.memory(source).pinned and source.stride() == target.stride():
                    reads = True
                    self._copy(self.arriving, source, target)
                else:
                    self._through_slots(source, target)
            event.points = [self.arriving.record_event()]
            return reads
        for source, snapshot in zip(sources, snapshots, strict=False):
            machine.copy(stream, source, snapshot)
        self.leaving.wait_event(stream.record_event())
        sources = snapshots or sources
        if self.target.type == "cpu" or self._peers:
            if self.target.type != "cpu":
                self.leaving.wait_event(self.arriving.record_event())
            for source, target in zip(sources, targets, strict=True):
                self._copy(self.leaving, source, target)
            event.points = [self.leaving.record_event()]
            if self.target.type != "cpu":
                self.arriving.wait_event(event.points[0])
        else:
            for source, target in zip(sources, targets, strict=True):
                self._through_slots(source, target)
            event.points = [self.arriving.record_event()]
        return False

    def mark(self, event: RecordedEvent, streams: list[Agent], /) -> bool:
        assert all(stream.device == self.target for stream in streams)
        if any(stream.is_captured for stream in streams):
            return False
        event.points = [stream.record_event() for stream in streams]
        return True

    def _copy(self, agent: Agent, source: Tensor, target: Tensor) -> None:
        self.machine.copy(agent, source, target, between=(self.source, self.target))

    def _through_slots(self, source: Tensor, target: Tensor) -> None:
        if not self.slots:
            self.slots = [_Slot(self), _Slot(self)]
        with self.machine.unseen():
            laid_out = torch.empty_like(target).copy_(source.detach())
            given, taken = _bytes(laid_out), _bytes(target)
        for begin in range(0, given.numel(), self.slot_bytes):
            slot = self.slots.pop(0)
            self.slots.append(slot)
            with self.machine.unseen():
                read = given[begin : begin + self.slot_bytes]
                written = taken[begin : begin + self.slot_bytes]
                memory = slot.memory[: read.numel()]
            filling = self.machine.host if self.source.type == "cpu" else self.leaving
            if slot.free is not None:
                if self.source.type == "cpu":
                    slot.free.synchronize()
                else:
                    self.leaving.wait_event(slot.free)
            self.machine.copy(filling, read, memory, of=source)
            if self.source.type != "cpu":
                self.arriving.wait_event(self.leaving.record_event())
            self.machine.copy(self.arriving, memory, written)
            slot.free = self.arriving.record_event()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor: ``[bytes]``."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
