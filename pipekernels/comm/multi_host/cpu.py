"""Collectives of CPU tensors over several hosts: inside each host, between hosts, inside again.

With ``P`` ranks on the host that has the fewest, the ranks at positions ``0 .. P - 1`` of each host
carry a ``P``-th of the data each, over one link per position::

    host 0    rank a --- rank b     rank c      shared memory
                |          |
    host 1    rank d --- rank e
              link 0     link 1
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pipekernels.comm.codes import OPERATIONS, REDUCIBLE, operation_of
from pipekernels.comm.multi_host.agreement import Agreement
from pipekernels.comm.multi_host.hosts import HostMap, Link
from pipekernels.comm.shared_memory import SharedMemoryBackend

# Extra seconds that the ranks of a host wait for each other, so that ranks with a link can first
# report a timeout of another host.
GRACE = 1.0


class MultiHostBackend:
    """A :class:`SharedMemoryBackend` over several hosts: agrees on each collective, then runs its
    steps.

    Args:
        local: the backend over the ranks of this host; owned.
        host_map: of all ranks.
        link: to the ranks at this position on the other hosts; ``None`` if a host has none.
        timeout: seconds that a call waits for one in another thread.
    """

    def __init__(
        self, local: SharedMemoryBackend, host_map: HostMap, link: Link | None, timeout: float
    ) -> None:
        self._local = local
        self._host_map = host_map
        self._link = link
        self._agreement = Agreement(local, host_map, link, timeout)
        # Collectives need several steps.
        self.flat_calls = self.core = None
        self.all_reduce_tensor: Callable[..., bool] = lambda *_: False
        self.empty = local.empty
        self.output = local.output
        self.close = self._agreement.close
        self.abort = functools.partial(self._agreement.close, abort=True)

    def barrier(self) -> None:
        with self._agreement.collective("barrier", None):
            pass

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        is_known = op in (*OPERATIONS, "premul_sum") and (op != "avg" or dtype.is_floating_point)
        return is_known and dtype in REDUCIBLE

    def announce(self, call: str, tensor: Tensor, op: str = "", root: int = 0) -> None:
        described = tensor.new_empty(0) if call == "all_to_all" else tensor
        with self._agreement.collective(call, described, op, f"root={root}"):
            pass

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        op = in_any_order(tensor, op)
        with self._agreement.collective("all_reduce", tensor, op, algorithm):
            if tensor.numel() > 0:
                flat = tensor.view(-1)
                flat.copy_(self._reduced(flat, op))

    def reduce_scatter(self, input: Tensor, output: Tensor, op: str) -> None:
        op = in_any_order(input, op)
        with self._agreement.collective("reduce_scatter", input, op):
            if output.numel() > 0:
                reduced = self._reduced(input.view(-1), op)
                mine = reduced[self._host_map.rank * output.numel() :][: output.numel()]
                output.view(-1).copy_(mine)

    def all_gather(self, input: Tensor, output: Tensor) -> None:
        with self._agreement.collective("all_gather", input):
            if input.numel() > 0:
                gathered = self._gathered(bytes_of(input)).flatten()
                output.view(-1).copy_(gathered.view(output.dtype))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with self._agreement.collective("broadcast", tensor, f"src={src}"):
            if tensor.numel() > 0:
                copied = self._copied(bytes_of(tensor), src).view(tensor.dtype)
                if self._host_map.rank != src:
                    tensor.view(-1).copy_(copied)

    def _reduced(self, tensor: Tensor, op: str) -> Tensor:
        """``tensor``, ``[n]``, reduced over all ranks by ``op``: inside each host, then each link's
        part between hosts."""
        part = self._per_link(tensor.numel())
        # 1. Inside the host, each rank reduces a part. Ranks without a link reduce padding.
        padded = self._shared(len(self._host_map.members) * part, tensor.dtype)
        padded[: tensor.numel()] = tensor
        padded[tensor.numel() :] = 0
        mine = self._shared(part, tensor.dtype)
        self._local.reduce_scatter(padded, mine, "sum" if op == "avg" else op)
        # 2. Between hosts, all links at once. All ranks of a link get the same bits.
        if self._link is not None:
            if op in ("max", "min"):  # Gather and reduce here: those of Gloo may lose a NaN.
                parts = self._link.all_gather(mine)
                mine.copy_(parts.amax(0) if op == "max" else parts.amin(0))
            else:
                self._link.sum(mine)
            if op == "avg":
                mine /= self._host_map.world_size
        # 3. Inside the host, all get all parts.
        self._local.all_gather(mine, padded)
        return padded[: tensor.numel()]

    def _gathered(self, data: Tensor) -> Tensor:
        """The bytes of all ranks, ``[world_size, data.numel()]``."""
        size, hosts = data.numel(), len(self._host_map.hosts)
        links, most = self._host_map.links, self._host_map.most
        part = self._per_link(most * size)
        block = data.new_zeros(links * part)  # This host's bytes, padded.
        self._local.all_gather(data, block)
        mine = self._shared(hosts * part, torch.uint8)
        if self._link is not None:
            mine.copy_(self._link.all_gather(self._part_of(block, part)).flatten())
        # Each link has brought a part of every host's block: put the blocks together.
        parts = data.new_empty(len(self._host_map.members), hosts, part)
        self._local.all_gather(mine, parts)
        blocks = parts[:links].transpose(0, 1).reshape(hosts, links * part)
        return blocks[:, : most * size].reshape(-1, size)[self._host_map.places]

    def _copied(self, data: Tensor, root: int) -> Tensor:
        """The bytes of rank ``root``; ``data`` are this rank's."""
        host, part = self._host_map.host_of(root), self._per_link(data.numel())
        padded = data.new_zeros(len(self._host_map.members) * part)
        padded[: data.numel()] = data
        if host == self._host_map.host:
            position = self._host_map.members.index(root)
            self._local.broadcast(padded[: data.numel()], position)
        # The ranks with links of the root's host send a part each; those of other hosts join them.
        mine = self._shared(part, torch.uint8)
        mine.copy_(self._part_of(padded, part))
        if self._link is not None:
            self._link.broadcast(mine, host)
        if host != self._host_map.host:
            self._local.all_gather(mine, padded)
        return padded[: data.numel()]

    def _per_link(self, elements: int) -> int:
        return -(-elements // self._host_map.links)  # Rounded up.

    def _part_of(self, padded: Tensor, part: int) -> Tensor:
        """The part of this rank's link; may be empty."""
        return padded[self._host_map.position * part :][:part]

    def _shared(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer, if possible one that the other ranks of this host read in place."""
        return self._local.output(torch.Size((elements,)), dtype)


def in_any_order(tensor: Tensor, op: str) -> str:
    """``op`` without its order. Raises ValueError if a sum in tree order depends on that."""
    operation = operation_of(op)
    if operation != op and tensor.is_floating_point():
        raise ValueError(
            "order='tree' is for communicators on one host, as the links between hosts add in "
            "another order; use order='rank', or split() the communicator by hosts"
        )
    return operation


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, of one dimension."""
    return tensor.view(-1).view(torch.uint8)
