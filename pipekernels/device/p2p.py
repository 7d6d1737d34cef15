"""The compiled side of an edge: the only place that makes its objects.

The extension issues copies and owns what they need besides the tensors: streams, events, pinned
memory. What it must be given, and when memory may be given back, is in
``csrc/include/pipekernels/p2p_copy/p2p_copy.h``. Streams are handles; that
of default streams is 0, and so is the CPU's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.device import streams

_log = logging.getLogger(__name__)


class Ticket(Protocol):
    """Points in streams; none in a new ticket."""

    def wait(self, device: int, stream: int, /) -> bool:
        """Make work issued later in ``stream`` of ``device`` wait. False, and nothing is done, if
        the stream is being captured."""

    def synchronize(self) -> None:
        """Make the calling thread wait."""

    def is_done(self) -> bool:
        """Whether all points have been reached."""


class NativeEdge(Protocol):
    """The streams and copies of an edge."""

    @property
    def leaving(self) -> int:
        """The stream in which sources are read."""

    @property
    def arriving(self) -> int:
        """The stream to which the memory of targets belongs."""

    def send(
        self,
        ticket: Ticket,
        sources: list[Tensor],
        targets: list[Tensor],
        snapshots: list[Tensor],
        stream: int,
        threads: int,
        /,
    ) -> bool:
        """Issue all copies, after the work issued so far in ``stream`` of the source, and make
        ``ticket`` the point after them. Snapshots, if there are any, are copied first, in
        ``stream``. Returns whether memory of sources on the CPU is still read. If it raises,
        nothing that it has issued still runs."""

    def mark(self, ticket: Ticket, streams: list[int], /) -> bool:
        """Make ``ticket`` the points after the work issued so far in ``streams`` of the target.
        False, and nothing is done, if one of them is being captured."""


@functools.cache
def _tickets() -> Callable[[], Ticket]:
    tickets: Callable[[], Ticket] = _backend.load().P2PTicket
    return tickets


def new_ticket() -> Ticket:
    """A ticket for ``send`` or ``mark``."""
    return _tickets()()


def new_edge(source: torch.device, target: torch.device, slot_bytes: int) -> NativeEdge:
    """The compiled side of an edge; RuntimeError if torch or the extension cannot use a device."""
    for device in (source, target):
        if streams.has_streams(device):
            _backend.require_cuda_devices()
            _backend.require_cuda(device)
    edge = _backend.load().P2PEdge(index(source), index(target), slot_bytes)
    way = "by peer access" if edge.has_peer_access else "by way of the CPU's memory or the driver"
    _log.info("copies from %s to %s go %s", source, target, way)
    if edge.has_peer_access:
        # torch's allocator may map memory itself (expandable segments), and then has to be told
        # that the source writes to the target's. A copy of torch's own does that.
        leaving = streams.external(source, edge.leaving)
        with streams.using(leaving), streams.using(streams.external(target, edge.arriving)):
            torch.empty(1, device=target).copy_(torch.zeros(1, device=source), non_blocking=True)
    native: NativeEdge = edge
    return native


def index(device: torch.device) -> int:
    """The number by which the extension knows ``device``: -1 is the CPU."""
    return device.index if streams.has_streams(device) else -1
