"""Makes the links between the ranks at one position of all hosts.

Each link is a process group made directly. :func:`torch.distributed.new_group` needs all ranks of
the job, or names groups by the number of groups of a rank, which may differ between ranks.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from pipekernels.comm.hosts.link import GlooLink, Link
from pipekernels.comm.hosts.nccl_link import connect_nccl


class Route:
    """Has a link for CPU tensors, and makes others for CUDA tensors.

    Making a route or a link is a collective over the ranks of the position.

    Args:
        store: reachable by all of them.
        name: unique for this route.
        host: the index of this rank's host.
        hosts: the number of hosts.
        timeout: of an operation of a link, in seconds.
        cuda_backend: :mod:`torch.distributed` backend for CUDA tensors.

    Attributes:
        link: for CPU tensors; the user of the route owns it.
    """

    def __init__(
        self, store: dist.Store, name: str, host: int, hosts: int, timeout: float, cuda_backend: str
    ) -> None:
        self._store = store
        self._name = name
        self._host = host
        self._hosts = hosts
        self._timeout = timeout
        self._cuda_backend = cuda_backend
        self._links = 0
        self.link: Link = self._connect_gloo()

    def connect(self, device: torch.device) -> Link:
        """Another link, for tensors on ``device``.

        Raises:
            RuntimeError: there is no backend for the device, or connecting fails.
        """
        if self._cuda_backend == "gloo":
            return self._connect_gloo()
        if self._cuda_backend == "nccl":
            store = self._next_store()
            return connect_nccl(store, self._host, self._hosts, device, self._timeout)
        has = repr(self._cuda_backend) if self._cuda_backend else "none"
        raise RuntimeError(
            "CUDA tensors go from host to host by the backend that the process group has for them, "
            f"NCCL or Gloo, but this one has {has}; make the communicator from a group that was "
            "initialised with backend='cpu:gloo,cuda:nccl'"
        )

    def _connect_gloo(self) -> GlooLink:
        limit = datetime.timedelta(seconds=self._timeout)
        return GlooLink(dist.ProcessGroupGloo(self._next_store(), self._host, self._hosts, limit))

    def _next_store(self) -> dist.Store:
        """A part of the store for one link, with the same name on all ranks of the route."""
        self._links += 1
        return dist.PrefixStore(f"{self._name}/{self._links}", self._store)
