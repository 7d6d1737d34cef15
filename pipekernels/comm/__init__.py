"""Communicators: the ranks of a job, and collectives between them.

Each file uses files below it::

    communicator    makes, splits and closes communicators
    bootstrap/      how processes become ranks
    collectives     checks arguments, and chooses the backend for a tensor's device
    cuda            the backend for the GPUs of one host
    shared_memory   the backend for the CPUs of one host
    process_group   the backend over several hosts: torch's Gloo or NCCL
    tensors         dtypes, layouts and memory that collectives take; their codes are in codes
"""

from pipekernels.comm.communicator import CollectiveBarrier, Communicator
from pipekernels.comm.errors import PeerError

__all__ = ["CollectiveBarrier", "Communicator", "PeerError"]
