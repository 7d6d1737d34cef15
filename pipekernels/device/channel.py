"""Copies between two devices that overlap with computation on both.

The extension issues them, in the order in which they are sent, on streams of their own, which wait
only for the source and for free memory at the target; it owns streams, events and pinned memory
(``csrc/include/pipekernels/p2p_copy/p2p_copy.h``). It knows streams by handles: 0 for default
streams, and for the CPU. This module says who owns which memory, and for how long:

*Sources* were allocated on the source's computing stream. The channel refers to them until the next
copy is sent; then it makes that stream wait for the copy, and drops them. So one source can be read
while the next one is computed. CPU memory is read in place only if it is pinned; then the channel
refers to it until the copy is done.

*Received buffers* are allocated on the copies' own stream, so that a copy never waits for the
target's computation. Layers may keep them for the backward, so the channel keeps a reference to the
storage of each, and checks at every later copy whether it is the last one. If so, all work that
reads the buffer has been issued: the channel records an event on each stream that used it, and at
the copy after that makes the copies' stream wait for these events and drops the buffer. If layers
keep nothing, two buffers alternate. Copies to the CPU arrive in pinned memory, which the channel
refers to until the copy is done: torch's allocator does not know of the copy.

A copy's values become visible to the target's stream, or to the CPU, through ``PendingCopy.wait``.
The calling thread waits only where the CPU is to read received values, or to write memory (of the
extension, or pinned memory of the caller) that a copy still reads.

CUDA graphs cannot hold copies: :meth:`Channel.send` and ``PendingCopy.wait`` raise on a stream that
is being captured. Dependencies with such a stream are recorded and applied later.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from pipekernels import _backend
from pipekernels._torch_private import storage_key, storage_references
from pipekernels.device import streams
from pipekernels.device.streams import HOST

_log = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20

Event = Any
"""``P2PEvent``: points in streams; none in a new event."""


def event_class() -> Callable[[], Event]:
    """Makes events for ``send`` or ``mark``."""
    return _backend.load().P2PEvent  # type: ignore[no-any-return]


def native_channel(source: torch.device, target: torch.device) -> Any:
    """A ``P2PChannel``; RuntimeError if torch or the extension cannot use a device."""
    for device in (source, target):
        if streams.has_streams(device):
            _backend.require_cuda(device)
    channel = _backend.load().P2PChannel(_index(source), _index(target), SLOT_BYTES)
    way = "by peer access" if channel.has_peer_access else "through the CPU's memory or the driver"
    if channel.has_broken_link:
        way = "through the CPU's memory, as others get lost: turn off ACS"
    level = logging.WARNING if channel.has_broken_link else logging.INFO
    _log.log(level, "copies from %s to %s go %s", source, target, way)
    if channel.has_peer_access:
        # torch's allocator may map memory itself (expandable segments), and then has to be told
        # that the source writes to the target's. A copy of torch's own does that.
        leaving = streams.external(source, channel.leaving)
        with streams.using(leaving), streams.using(streams.external(target, channel.arriving)):
            torch.empty(1, device=target).copy_(torch.zeros(1, device=source), non_blocking=True)
    return channel


def _index(device: torch.device) -> int:
    """The number by which the extension knows ``device``: -1 is the CPU."""
    return device.index if streams.has_streams(device) else -1


class PendingCopy:
    """Copies in flight to ``device``; ``done`` is the point after them, None if they are done."""

    def __init__(self, device: torch.device, done: Event | None) -> None:
        self.users: list[int] = []  # Handles of the streams that have waited for the copies.
        self._device = device
        self._done = done

    def wait(self) -> None:
        """Make the device's current stream (for the CPU, the calling thread) wait for the copies.
        Call it before their first use. RuntimeError if the stream is being captured."""
        if self._done is None:
            return
        if self._device.type == "cpu":
            self._done.synchronize()
            return
        user = streams.current_handle(self._device)
        if not self._done.wait(self._device.index, user):
            raise RuntimeError(
                f"the current stream of {self._device} is being captured, and a CUDA graph cannot "
                "wait for copies from another device; wait for them before the capture"
            )
        self.users.append(user)


class _PendingSource(NamedTuple):
    """Memory that a copy may still read."""

    origin: int
    done: Event
    memory: list[UntypedStorage]


class _ReceivedBuffer(NamedTuple):
    """A buffer that callers may still refer to: no longer if it has fewer references."""

    storage: UntypedStorage
    key: int
    references: int
    pending: PendingCopy


class Channel:
    """Copies tensors from device ``source`` to another device, ``target``; thread-safe.

    Copies overlap computation between CUDA devices and the CPU. Copies between other devices are
    done when :meth:`send` returns.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source = source
        self.target = target
        types = {source.type, target.type}
        self._overlaps = "cuda" in types and types <= {"cpu", "cuda"}
        self._from, self._to = _index(source), _index(target)
        if self._overlaps:
            self._native, self._new_event = native_channel(source, target), event_class()
            self._arriving = streams.external(target, self._native.arriving)
            self._are_plain = _backend.load().are_plain
        self._sources: list[_PendingSource] = []
        self._received: list[_ReceivedBuffer] = []
        self._unused: list[tuple[Event, list[_ReceivedBuffer]]] = []  # The event: after all uses.
        self._pending_host_copies: list[tuple[Event, list[UntypedStorage]]] = []
        self._lock = threading.Lock()

    def send(
        self, tensors: Sequence[Tensor], *, snapshot: bool = False
    ) -> tuple[list[Tensor], PendingCopy]:
        """Begin to copy ``tensors``, as they are at this point of the source's current stream.

        Args:
            tensors: on the source; any strides, which copies of dense tensors share.
            snapshot: whether the caller may overwrite those on a CUDA device before :meth:`settle`
                is called, for which they are first copied there. Pinned memory is read until then.

        Returns:
            The copies, detached, and the pending to wait for before they are used.
        """
        if not self._overlaps:
            return [t.detach().to(self.target) for t in tensors], PendingCopy(self.target, None)
        with self._lock:
            origin = streams.current_handle(self.source)
            self._reclaim()
            # The extension copies memory as it is, without lazy conjugates or negatives. A snapshot
            # is written on the source's own stream, so the caller may overwrite the tensor at once.
            sources = list(tensors)
            if not self._are_plain(sources):
                sources = [t.detach().resolve_conj().resolve_neg() for t in sources]
            snapshots: list[Tensor] = []
            if snapshot and self._from >= 0 and self._to >= 0:
                snapshots = [torch.empty_like(s) for s in sources]
            if self._arriving is HOST:
                copies = [pinned_like(s) for s in sources]
            else:
                copies = streams.empty_like(sources, self.target, self._arriving)
            done = self._new_event()
            pending = PendingCopy(self.target, done)
            # All memory is listed before a copy is issued, in case send() raises afterwards.
            read = [tensor.untyped_storage() for tensor in snapshots or sources]
            written = [tensor.untyped_storage() for tensor in copies]
            source = _PendingSource(origin, done, read)
            self._sources.append(source)
            if self._arriving is HOST:
                self._pending_host_copies.append((done, written))
            else:
                for storage in written:  # Each copy is one of the references.
                    key = storage_key(storage)
                    references = storage_references(key)
                    self._received.append(_ReceivedBuffer(storage, key, references, pending))
            still_reads = self._native.send(
                done, sources, copies, snapshots, origin, torch.get_num_threads()
            )
            if self._from < 0 and not still_reads:  # It has staged what was not pinned.
                self._sources.remove(source)
        return copies, pending

    def settle(self, *, blocking: bool = True) -> None:
        """Drop all sources, and the received buffers that are no longer used; if not ``blocking``,
        only if no other call on the channel is in progress.

        The streams that computed the sources, or the thread if it is the CPU, wait for the copies,
        so later work on them may overwrite the sources.
        """
        if self._lock.acquire(blocking):
            try:
                if self._from < 0:
                    for source in self._sources:
                        source.done.synchronize()
                self._reclaim()
                self._reclaim()  # The first one has marked buffers.
            finally:
                self._lock.release()

    def _reclaim(self) -> None:
        """Drop the sources of the last copy, and the received buffers that an earlier call has
        marked; mark those that are no longer used since."""
        # A stream waits for the copies, unless it is being captured. The CPU must not wait here.
        while self._sources:
            first = self._sources[0]
            on_host = self._from < 0
            if not (first.done.is_done() if on_host else first.done.wait(self._from, first.origin)):
                break
            del self._sources[:1]
        # From here on the copies' stream may allocate this memory again.
        while self._unused:
            self._unused[0][0].wait(self._to, self._native.arriving)
            del self._unused[:1]
        self._pending_host_copies = [p for p in self._pending_host_copies if not p[0].is_done()]
        # In one pass without calls of Python: every copy looks at all buffers.
        kept = [b for b in self._received if storage_references(b.key) >= b.references]
        if len(kept) < len(self._received):
            kept_keys = {buffer.key for buffer in kept}
            unused = [buffer for buffer in self._received if buffer.key not in kept_keys]
            # All work that reads them has been issued, to the streams that waited for the copies.
            used = self._new_event()
            users = {stream for buffer in unused for stream in buffer.pending.users}
            if self._native.mark(used, list(users)):  # Not while one of them is being captured.
                self._unused.append((used, unused))
                self._received = kept


def pinned_like(tensor: Tensor) -> Tensor:
    """As ``torch.empty_like(tensor)``, in pinned CPU memory, for asynchronous copies."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


# Channels belong to the process, as streams do: the next pipe frees what the last one left.
_channels: dict[tuple[torch.device, torch.device, bool], Channel] = {}
_channels_lock = threading.RLock()


def channel(source: torch.device, target: torch.device, backward: bool = False) -> Channel:
    """The process's channel from ``source`` to ``target``, two devices (CUDA ones with an index).

    ``backward`` selects the channel for gradients, which has its own streams.
    """
    key = (source, target, backward)
    with _channels_lock:
        if key not in _channels:
            _channels[key] = Channel(source, target)
        return _channels[key]


def settle_all() -> None:
    """Call :meth:`Channel.settle` on every channel, unless the interpreter is exiting. For the
    garbage collector, which an allocation in another call on a channel may run."""
    if not sys.is_finalizing():
        for each in list(_channels.values()):
            each.settle(blocking=False)
