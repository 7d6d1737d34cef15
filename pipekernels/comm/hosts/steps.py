"""The steps of a collective over several hosts: inside each host, between the hosts, inside again.

With ``P`` ranks on the host that has the fewest, the ranks at positions ``0 .. P - 1`` of each host
carry a ``P``-th of the data each, over a lane of their own::

    host 0    rank a --- rank b     rank c      shared memory, or CUDA devices that reach each other
                |          |
    host 1    rank d --- rank e
              lane 0     lane 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm.codes import MOVABLE, REDUCTIONS
from pipekernels.comm.hosts.call import BYTES
from pipekernels.comm.hosts.layout import Layout
from pipekernels.comm.hosts.link import Lane
from pipekernels.comm.hosts.memory import tensor_at

_SUM, _AVG, _MAX = REDUCTIONS["sum"], REDUCTIONS["avg"], REDUCTIONS["max"]

ReduceInPlace = Callable[[Tensor, int], None]


class Steps:
    """What all collectives have in common, on one device.

    Args:
        local: what has the methods of ``_C.Communicator`` for tensors on ``device``, over the ranks
            of this host.
        lane: that of this rank's position, for ``device``; ``None`` if there is none.
        layout: of all ranks.
        device: where the tensors are.
        shared: makes a tensor of so many elements of a dtype, best in memory that the other ranks of
            this host read in place.
    """

    def __init__(
        self,
        local: Any,
        lane: Lane | None,
        layout: Layout,
        device: torch.device,
        shared: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        self._local = local
        self._lane = lane
        self._layout = layout
        self._device = device
        self._shared = shared
        self._places = torch.tensor(layout.places, device=device)

    def at(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """The ``count`` elements at ``address``; the caller keeps them."""
        return tensor_at(address, count, dtype, self._device)

    def reduced(
        self, tensor: Tensor, reduction: int, reduce_inside: ReduceInPlace | None = None
    ) -> Tensor:
        """``tensor`` reduced over all ranks: a part per lane, reduced in this host, then beyond.

        Args:
            tensor: ``[n]``.
            reduction: its code.
            reduce_inside: reduces its argument over the ranks of this host, in place, by the code
                given; if ``None``, only each rank's part is reduced, in a copy.
        """
        inside = _SUM if reduction == _AVG else reduction
        part = -(-tensor.numel() // self._layout.lanes)
        if reduce_inside is not None:
            reduce_inside(tensor, inside)
        # Ranks without a lane reduce padding.
        padded = self._shared(len(self._layout.members) * part, tensor.dtype)
        padded[: tensor.numel()] = tensor
        padded[tensor.numel() :] = 0
        mine = self._shared(part, tensor.dtype)
        code = MOVABLE[tensor.dtype]
        if reduce_inside is None:
            self._local.reduce_scatter(padded.data_ptr(), mine.data_ptr(), part, code, inside, 0)
        else:
            mine.copy_(self._part_of(padded, part))
        if self._lane is not None:
            self._reduce_between(self._lane, mine, reduction)
        self._local.all_gather(mine.data_ptr(), padded.data_ptr(), part, code, 0)
        return padded[: tensor.numel()]

    def gathered(self, data: Tensor) -> Tensor:
        """``[world_size, data.numel()]``: the bytes of all ranks."""
        size, hosts = data.numel(), len(self._layout.hosts)
        lanes, most = self._layout.lanes, self._layout.most
        part = -(-most * size // lanes)
        block = self._zeros(lanes * part)  # Of this host.
        self._local.all_gather(data.data_ptr(), block.data_ptr(), size, BYTES, 0)
        mine = self._shared(hosts * part, torch.uint8)
        if self._lane is not None:
            mine.copy_(self._lane.all_gather(self._part_of(block, part)).flatten())
        shape = (len(self._layout.members), hosts, part)
        parts = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._local.all_gather(mine.data_ptr(), parts.data_ptr(), hosts * part, BYTES, 0)
        blocks = parts[:lanes].transpose(0, 1).reshape(hosts, lanes * part)
        return blocks[:, : most * size].reshape(-1, size)[self._places]

    def copied(self, data: Tensor, root: int) -> Tensor:
        """The bytes of rank ``root``, of which ``data`` are this rank's."""
        host, part = self._layout.host_of(root), -(-data.numel() // self._layout.lanes)
        padded = self._zeros(len(self._layout.members) * part)
        padded[: data.numel()] = data
        if host == self._layout.host:
            position = self._layout.members.index(root)
            self._local.broadcast(padded.data_ptr(), data.numel(), BYTES, position, 0)
        mine = self._shared(part, torch.uint8)
        mine.copy_(self._part_of(padded, part))
        if self._lane is not None:
            self._lane.broadcast(mine, host)
        if host != self._layout.host:
            self._local.all_gather(mine.data_ptr(), padded.data_ptr(), part, BYTES, 0)
        return padded[: data.numel()]

    def _reduce_between(self, lane: Lane, mine: Tensor, reduction: int) -> None:
        """Over the hosts, in place."""
        if reduction in (_SUM, _AVG):
            lane.sum(mine)
        else:  # Gathered, since Gloo and NCCL may lose a NaN.
            parts = lane.all_gather(mine)
            mine.copy_(parts.amax(0) if reduction == _MAX else parts.amin(0))
        if reduction == _AVG:
            mine /= self._layout.world_size

    def _part_of(self, padded: Tensor, part: int) -> Tensor:
        """What this rank's lane carries; empty if it has none, or nothing is left for it."""
        return padded[self._layout.position * part :][:part]

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)
