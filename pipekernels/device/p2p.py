"""The compiled side of an edge: the only place that makes its objects.

The extension issues copies and owns what they need besides the tensors: streams, events, pinned
memory. ``csrc/include/pipekernels/p2p_copy/p2p_copy.h`` says what its objects are given and
promise. Streams are handles; that of default streams is 0, and so is the CPU's.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from pipekernels import _backend
from pipekernels.device import streams

_log = logging.getLogger(__name__)

Ticket = Any
"""``P2PTicket``: points in streams; none in a new ticket."""


def new_ticket() -> Ticket:
    """A ticket for ``send`` or ``mark``."""
    return _backend.load().P2PTicket()


def new_edge(source: torch.device, target: torch.device, slot_bytes: int) -> Any:
    """A ``P2PEdge``; RuntimeError if torch or the extension cannot use a device."""
    for device in (source, target):
        if streams.has_streams(device):
            _backend.require_cuda(device)
    edge = _backend.load().P2PEdge(index(source), index(target), slot_bytes)
    way = "by peer access" if edge.has_peer_access else "through the CPU's memory or the driver"
    _log.info("copies from %s to %s go %s", source, target, way)
    if edge.has_peer_access:
        # torch's allocator may map memory itself (expandable segments), and then has to be told
        # that the source writes to the target's. A copy of torch's own does that.
        leaving = streams.external(source, edge.leaving)
        with streams.using(leaving), streams.using(streams.external(target, edge.arriving)):
            torch.empty(1, device=target).copy_(torch.zeros(1, device=source), non_blocking=True)
    return edge


def index(device: torch.device) -> int:
    """The number by which the extension knows ``device``: -1 is the CPU."""
    return device.index if streams.has_streams(device) else -1
