"""Which ranks are on which host, and the connection of one rank of every host, over Gloo."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_POLL = 0.02  # Seconds between looks whether the link has been closed.


class HostMap:
    """The ranks of a communicator over several hosts, from the view of one rank.

    Args:
        hosts: the ranks on each host.
        rank: this rank.
    """

    def __init__(self, hosts: list[list[int]], rank: int) -> None:
        self.hosts = hosts
        self.rank = rank
        self.links = min(map(len, hosts))  # Positions that each host has; each has a link.
        self.most = max(map(len, hosts))  # Ranks of the largest host.
        self.world_size = sum(map(len, hosts))
        self.places = [0] * self.world_size  # Of each rank in a flat table [hosts, most].
        for host, members in enumerate(hosts):
            for position, member in enumerate(members):
                self.places[member] = host * self.most + position
        self.host = self.host_of(rank)
        self.members = hosts[self.host]  # The ranks of this host.
        self.position = self.members.index(rank)  # Of this rank on its host.

    def host_of(self, rank: int) -> int:
        """The index of the host of ``rank``."""
        return self.places[rank] // self.most


class LinkError(RuntimeError):
    """A rank of another host is gone or late; the link does not know which one.

    Attributes:
        reason: the transport's message.
        late: whether it is a timeout.
    """

    def __init__(self, reason: str, *, late: bool) -> None:
        what = "did not arrive in time" if late else "is gone"
        super().__init__(f"a rank of another host {what} ({reason})")
        self.reason = reason
        self.late = late


class Link:
    """Connects one rank of every host over Gloo; a rank in the link is the index of its host.

    Tensors are contiguous, and on the CPU. Every method raises LinkError if another rank is gone or
    late, and RuntimeError if this link is closed meanwhile. Operations wait until they are done;
    other hosts soon notice a disconnect.

    The link is a process group made directly, a collective over its ranks: ``new_group()`` needs
    all ranks of the job, or names groups by the number of groups of a rank, which may differ.

    Args:
        store: reachable by all hosts, for this link only.
        host: the index of this rank's host.
        hosts: the number of hosts.
        timeout: of an operation, in seconds.
    """

    def __init__(self, store: dist.Store, host: int, hosts: int, timeout: float) -> None:
        limit = datetime.timedelta(seconds=timeout)
        self._gloo: Any = dist.ProcessGroupGloo(store, host, hosts, limit)
        self._size = hosts
        self._pending: Any = None  # The operation in progress.
        self._lock = threading.Lock()  # Held to start an operation, or to close.
        self._process = os.getpid()

    def sum(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over the hosts, in place; every host receives the same bits."""
        self._run(lambda gloo: gloo.allreduce([tensor]))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[hosts, *tensor.shape]``: the tensors of all hosts."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        self._run(lambda gloo: gloo.allgather([list(gathered.unbind())], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy ``tensor`` of host ``root`` to all hosts, in place."""
        self._run(lambda gloo: gloo.broadcast(tensor, root))

    def close(self) -> None:
        """Disconnect; an operation in progress fails."""
        if os.getpid() != self._process:
            return  # A forked child has no Gloo threads to end.
        # An operation that waits sees this within _POLL, and gives up.
        with self._lock:
            gloo, self._gloo = self._gloo, None
        # Destroying Gloo waits for the pending operation, up to its timeout: do so in a thread.
        if gloo is not None and self._pending is not None:
            threading.Thread(target=_outlive, args=(gloo, self._pending), daemon=True).start()

    def _run(self, call: Callable[[Any], Any]) -> None:
        """Start ``call(gloo)`` and wait for its end, which close() and Ctrl-C can cut short."""
        reason = self._attempt(call)
        if self._gloo is None:
            raise RuntimeError("this communicator has been closed; make a new one")
        if reason:
            late = "timed out" in reason.lower() or "timeout" in reason.lower()
            raise LinkError(reason, late=late)

    def _attempt(self, call: Callable[[Any], Any]) -> str:
        """Run ``call``; returns Gloo's error message, or ""."""
        ended = threading.Event()
        try:
            with self._lock:
                if self._gloo is None:
                    return ""
                self._pending = call(self._gloo)
            # Not work.wait(), which neither close() nor Ctrl-C could cut short.
            self._pending.get_future().then(lambda _: ended.set())
            while not ended.wait(_POLL):
                if self._gloo is None:
                    return ""
            work, self._pending = self._pending, None
            work.wait()
        except RuntimeError as error:
            return str(error)  # The exception's traceback would keep the connections open.
        return ""


def _outlive(gloo: Any, work: Any) -> None:
    """Hold ``gloo`` until ``work`` has ended."""
    with contextlib.suppress(RuntimeError):
        work.wait()
