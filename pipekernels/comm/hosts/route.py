"""How the ranks of one position on all hosts reach each other, and what links they make for it.

Links are groups of their own. Those made by :func:`torch.distributed.new_group` would need all
ranks of the job, or agree on their names by how many groups a rank has, which ranks need not have
in common.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from pipekernels.comm.hosts.link import GlooLink, Link
from pipekernels.comm.hosts.nccl_link import connect_nccl


class Route:
    """Has a link for CPU tensors, and makes others for those of a CUDA device.

    Making one, and a link, are collectives over the ranks of the position.

    Args:
        store: that all of them reach.
        name: of this route alone.
        host: the index of this rank's host, of so many ``hosts``.
        timeout: seconds that an operation of a link takes at most.
        cuda_backend: what carries CUDA tensors, as :mod:`torch.distributed` calls it.

    Attributes:
        link: that for CPU tensors; owned by who takes it.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        host: int,
        hosts: int,
        timeout: float,
        cuda_backend: str,
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
            RuntimeError: there is no backend for that, or it fails.
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
        """Keys that no other link uses; the ranks of the route make the same ones."""
        self._links += 1
        return dist.PrefixStore(f"{self._name}/{self._links}", self._store)
