"""Copies between two devices that overlap with computation on both.

Copies run on streams of their own, in the order in which they are sent, and wait only for their
source and for free memory at the target. Who owns which memory, and for how long:

*Sources* were allocated on the source's computing stream. The edge refers to them until the next
copy is sent; then it makes that stream wait for the copy, and drops them. So one source can be read
while the next one is computed. CPU memory is read in place only if it is pinned; then the calling
thread waits instead of a stream.

*Received buffers* are allocated on the copies' own stream, so that a copy never waits for the
target's computation. A fixed ring of buffers would not do, as layers may keep them for the
backward. So the edge keeps a reference to the storage of each, and checks at every later copy
whether it is the last one. If so, all work that reads the buffer has been issued: the edge records
an event on each stream that used it, and at the copy after that makes the copies' stream wait for
these events and drops the buffer. If layers keep nothing, two buffers alternate.

*Pinned memory* is the intermediate stop if a device cannot read the other's memory: two slots per
edge, used in turn. A slot is written again only after the event of the copy out of it. Copies to
the CPU arrive in pinned memory that torch's own allocator keeps until the copy is done.

A copy's values become visible to the target's stream, or to the CPU, through ``Arrival.wait``.
Nothing here uses ``record_stream``. The calling thread waits only where the CPU is to read received
values, or to write memory (a slot, or pinned memory of the caller) that a copy still reads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pipekernels._torch_private import storage_references
from pipekernels.device import streams
from pipekernels.device.restoring import holding
from pipekernels.device.streams import DONE, HOST, Event, Stream

SLOT_BYTES = 4 << 20


class Arrival:
    """Copies in flight.

    Args:
        device: their target.
        done: the event after the copies.
    """

    def __init__(self, device: torch.device, done: Event) -> None:
        self.users: list[Stream] = []
        """The streams that have waited for the copies and may use them."""
        self._device = device
        self._done = done

    def wait(self) -> None:
        """Make the device's current stream (for the CPU, the calling thread) wait for the copies.
        Call it before their first use."""
        stream = streams.current(self._device)
        stream.wait_event(self._done)
        self.users.append(stream)


class _Lent:
    """A received buffer that callers may still refer to."""

    def __init__(self, buffer: Tensor, arrival: Arrival) -> None:
        self.arrival = arrival
        self._storage = buffer.untyped_storage()
        self._references = self._count()  # ``buffer`` is one of them.

    def is_unused(self) -> bool:
        return self._count() < self._references

    def _count(self) -> int:
        return storage_references(self._storage)


class _Slot:
    """Pinned memory that one piece of a copy passes through."""

    def __init__(self) -> None:
        self.memory = pinned_empty((SLOT_BYTES,), (1,), torch.uint8)
        self.free = DONE


class Edge:
    """Copies tensors from device ``source`` to another device, ``target``; thread-safe.

    Copies overlap computation between CUDA devices and the CPU. Copies between other devices are
    done when :meth:`send` returns.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source = source
        self.target = target
        types = {source.type, target.type}
        self._overlaps = "cuda" in types and types <= {"cpu", "cuda"}
        self._leaving = streams.new(source)
        self._arriving = streams.new(target)
        self._staged = self._arriving is not HOST and not _can_read(target, source)
        self._slots: list[_Slot] = []
        self._sources: list[tuple[Stream, Event, list[Tensor]]] = []
        self._lent: list[_Lent] = []
        self._unused: list[tuple[list[Event], set[_Lent]]] = []
        # Reentrant: an allocation may run the garbage collector, which may call settle().
        self._lock = threading.RLock()

    def send(
        self, tensors: Sequence[Tensor], *, snapshot: bool = False
    ) -> tuple[list[Tensor], Arrival]:
        """Begin to copy ``tensors``, as they are at this point of the source's current stream.

        Args:
            tensors: on the source; any strides, which copies of dense tensors share.
            snapshot: whether the caller may overwrite them before :meth:`settle` is called. If so,
                they are first cloned on the source, or the thread waits for those in pinned memory.

        Returns:
            The copies, detached, and the arrival to wait for before they are used.
        """
        if not self._overlaps:
            return [t.detach().to(self.target) for t in tensors], Arrival(self.target, DONE)
        with holding(self._lock):
            origin = streams.current(self.source)
            sources = [_dense(t) for t in tensors]
            if snapshot and origin is not HOST and self._arriving is not HOST:
                sources = [
                    s.clone() if s.data_ptr() == t.data_ptr() else s
                    for s, t in zip(sources, tensors, strict=True)
                ]
            self._leaving.wait_event(origin.record_event())
            self._let_go_of_sources()
            self._take_back_buffers()
            copies: list[Tensor] = []
            try:
                for s in sources:
                    copies.append(self._copy(s))
            finally:  # If memory runs out, keep the memory of copies that are already in flight.
                last = self._leaving if self._arriving is HOST else self._arriving
                done = last.record_event()
                arrival = Arrival(self.target, done)
                read = [s for s in sources if origin is not HOST or s.is_pinned()]
                if read:
                    self._sources.append((origin, done, read))
                if self._arriving is not HOST:
                    self._lent += [_Lent(copy, arrival) for copy in copies]
            if snapshot and origin is HOST:
                self._let_go_of_sources()
        return copies, arrival

    def settle(self) -> None:
        """Drop all sources, and the received buffers that are no longer used.

        The streams that computed the sources wait for the copies, so later work on them may
        overwrite the sources.
        """
        with holding(self._lock):
            self._let_go_of_sources()
            self._take_back_buffers()
            self._take_back_buffers()

    def _let_go_of_sources(self) -> None:
        while self._sources:
            origin, done, _ = self._sources[0]
            origin.wait_event(done)
            del self._sources[:1]  # After the wait, in case Ctrl-C has interrupted that.

    def _take_back_buffers(self) -> None:
        while self._unused:
            for event in self._unused[0][0]:
                self._arriving.wait_event(event)
            del self._unused[:1]
        found = {buffer for buffer in self._lent if buffer.is_unused()}
        if found:
            users = {stream for buffer in found for stream in buffer.arrival.users}
            self._unused.append(([stream.record_event() for stream in users], found))
            self._lent = [buffer for buffer in self._lent if buffer not in found]

    def _copy(self, source: Tensor) -> Tensor:
        shape, strides, dtype = source.shape, source.stride(), source.dtype
        if self._arriving is HOST:
            copy = pinned_empty(shape, strides, dtype)
        else:
            with streams.using(self._arriving):
                copy = torch.empty_strided(shape, strides, dtype=dtype, device=self.target)
        if self._staged and not (self._leaving is HOST and source.is_pinned()):
            self._copy_in_pieces(_bytes(source), _bytes(copy))
        else:
            # Between two GPUs torch copies on the source's current stream after it has waited for
            # the target's, which then waits for the copy.
            with streams.using(self._leaving), streams.using(self._arriving):
                copy.copy_(source, non_blocking=True)
        return copy

    def _copy_in_pieces(self, source: Tensor, target: Tensor) -> None:
        """``[bytes]`` to ``[bytes]`` through the slots, which take turns."""
        if not self._slots:
            with torch.inference_mode(False):  # Inference tensors could not be written outside it.
                self._slots = [_Slot(), _Slot()]
        for begin in range(0, source.numel(), SLOT_BYTES):
            slot = self._slots.pop(0)
            self._slots.append(slot)
            piece = source[begin : begin + SLOT_BYTES]
            memory = slot.memory[: piece.numel()]
            self._leaving.wait_event(slot.free)
            with streams.using(self._leaving):
                memory.copy_(piece, non_blocking=True)
            self._arriving.wait_event(self._leaving.record_event())
            with streams.using(self._arriving):
                target[begin : begin + SLOT_BYTES].copy_(memory, non_blocking=True)
            slot.free = self._arriving.record_event()


def pinned_empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in pinned CPU memory, for asynchronous copies."""
    return torch.empty_strided(
        tuple(shape), tuple(strides), dtype=dtype, device="cpu", pin_memory=True
    )


def _can_read(device: torch.device, other: torch.device) -> bool:
    return streams.has_streams(other) and torch.cuda.can_device_access_peer(device, other)


def _dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself if its memory has no holes or overlaps, else a contiguous copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    # empty_like() keeps the strides of dense tensors only.
    kept = torch.empty_like(tensor, device="meta").stride()
    return tensor if kept == tensor.stride() else tensor.contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor: ``[bytes]``."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# Edges belong to the process, as streams do: the next pipe on an edge frees what the last one left.
_edges: dict[tuple[torch.device, torch.device, bool], Edge] = {}
_edges_lock = threading.RLock()


def edge(source: torch.device, target: torch.device, *, backward: bool = False) -> Edge:
    """The process's edge from ``source`` to ``target``, two devices (CUDA ones with an index).

    ``backward`` selects the edge for gradients, which has its own streams.
    """
    key = (source, target, backward)
    with holding(_edges_lock):
        if key not in _edges:
            _edges[key] = Edge(source, target)
        return _edges[key]


def settle_all() -> None:
    """Call :meth:`Edge.settle` on every edge of the process, unless the interpreter is exiting."""
    if not sys.is_finalizing():
        for each in list(_edges.values()):
            each.settle()
