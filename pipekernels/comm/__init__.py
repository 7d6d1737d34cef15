"""Communicators: the ranks of a job, and collectives between them."""

from pipekernels.comm.communicator import CollectiveBarrier, Communicator
from pipekernels.comm.errors import PeerError

__all__ = ["CollectiveBarrier", "Communicator", "PeerError"]
