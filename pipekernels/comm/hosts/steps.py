"""The steps of a collective over several hosts: inside each host, between the hosts, inside again.

With ``P`` ranks on the host that has the fewest, the ranks at positions ``0 .. P - 1`` of each host
carry a ``P``-th of the data each, over a link of their own::

    host 0    rank a --- rank b     rank c      shared memory
                |          |
    host 1    rank d --- rank e
              link 0     link 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels.comm.backend import Backend
from pipekernels.comm.hosts.host_map import HostMap
from pipekernels.comm.hosts.link import Link


class Steps:
    """Steps of the collectives.

    Args:
        local: the backend over the ranks of this host.
        link: the link of this rank's position, if any.
        host_map: of all ranks.
    """

    def __init__(self, local: Backend, link: Link | None, host_map: HostMap) -> None:
        self._local = local
        self._link = link
        self._host_map = host_map
        self._places = torch.tensor(host_map.places, device="cpu")

    def reduced(self, tensor: Tensor, op: str) -> Tensor:
        """``tensor``, ``[n]``, reduced over all ranks by ``op``: inside each host, then each link's
        part between hosts."""
        inside = "sum" if op == "avg" else op
        part = -(-tensor.numel() // self._host_map.links)
        # Ranks without a link reduce padding.
        padded = self._shared(len(self._host_map.members) * part, tensor.dtype)
        padded[: tensor.numel()] = tensor
        padded[tensor.numel() :] = 0
        mine = self._shared(part, tensor.dtype)
        self._local.reduce_scatter(padded, mine, inside)
        if self._link is not None:
            self._reduce_between(self._link, mine, op)
        self._local.all_gather(mine, padded)
        return padded[: tensor.numel()]

    def gathered(self, data: Tensor) -> Tensor:
        """The bytes of all ranks, ``[world_size, data.numel()]``."""
        size, hosts = data.numel(), len(self._host_map.hosts)
        links, most = self._host_map.links, self._host_map.most
        part = -(-most * size // links)
        block = self._zeros(links * part)  # This host's bytes, padded.
        self._local.all_gather(data, block)
        mine = self._shared(hosts * part, torch.uint8)
        if self._link is not None:
            mine.copy_(self._link.all_gather(self._part_of(block, part)).flatten())
        shape = (len(self._host_map.members), hosts, part)
        parts = torch.empty(shape, dtype=torch.uint8, device="cpu")
        self._local.all_gather(mine, parts)
        blocks = parts[:links].transpose(0, 1).reshape(hosts, links * part)
        return blocks[:, : most * size].reshape(-1, size)[self._places]

    def copied(self, data: Tensor, root: int) -> Tensor:
        """The bytes of rank ``root``; ``data`` are this rank's."""
        host, part = self._host_map.host_of(root), -(-data.numel() // self._host_map.links)
        padded = self._zeros(len(self._host_map.members) * part)
        padded[: data.numel()] = data
        if host == self._host_map.host:
            position = self._host_map.members.index(root)
            self._local.broadcast(padded[: data.numel()], position)
        mine = self._shared(part, torch.uint8)
        mine.copy_(self._part_of(padded, part))
        if self._link is not None:
            self._link.broadcast(mine, host)
        if host != self._host_map.host:
            self._local.all_gather(mine, padded)
        return padded[: data.numel()]

    def _reduce_between(self, link: Link, mine: Tensor, op: str) -> None:
        """Reduce over the hosts, in place."""
        if op in ("sum", "avg"):
            link.sum(mine)
        else:  # Gather and reduce here, as max and min of Gloo may lose a NaN.
            parts = link.all_gather(mine)
            mine.copy_(parts.amax(0) if op == "max" else parts.amin(0))
        if op == "avg":
            mine /= self._host_map.world_size

    def _part_of(self, padded: Tensor, part: int) -> Tensor:
        """The part of this rank's link; may be empty."""
        return padded[self._host_map.position * part :][:part]

    def _shared(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer, if possible one that the other ranks of this host read in place."""
        return self._local.output(torch.Size((elements,)), dtype)

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
