"""What connects one rank of every host: Gloo, torch's transport for CPU tensors."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor


class LaneError(RuntimeError):
    """A rank of another host is gone, or late; which one, only the transport knows.

    Attributes:
        late: whether it has not arrived in time.
    """

    def __init__(self, reason: str, *, late: bool) -> None:
        what = "did not arrive in time" if late else "is gone"
        super().__init__(f"a rank of another host {what} ({reason})")
        self.late = late


class Lane:
    """One rank of every host; the rank in the lane is the index of the host.

    All tensors are contiguous. Every method raises LaneError if another rank is gone or late.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: Any = gloo
        self._process = os.getpid()

    def sum(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over the hosts, in place; every host receives the same bits."""
        with self._transport() as gloo:
            gloo.allreduce([tensor]).wait()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[hosts, *tensor.shape]``: the tensors of all hosts."""
        with self._transport() as gloo:
            gathered = tensor.new_empty((gloo.size(), *tensor.shape))
            gloo.allgather([list(gathered.unbind())], [tensor]).wait()
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy ``tensor`` of host ``root`` to all hosts, in place."""
        with self._transport() as gloo:
            gloo.broadcast(tensor, root).wait()

    def close(self) -> None:
        """Hang up, which the other hosts notice at once."""
        if os.getpid() == self._process:  # A forked child has no threads of Gloo's to end.
            self._gloo = None

    @contextlib.contextmanager
    def _transport(self) -> Iterator[Any]:
        if self._gloo is None:
            raise RuntimeError("this communicator has been closed; make a new one")
        try:
            yield self._gloo
        except RuntimeError as error:
            reason = str(error)
            late = "timed out" in reason.lower() or "timeout" in reason.lower()
            raise LaneError(reason, late=late) from None


def connect(store: dist.Store, name: str, host: int, hosts: int, timeout: float) -> Lane:
    """A lane of which this process is number ``host``; ``name`` is that of this lane alone.

    A group made by :func:`torch.distributed.new_group` would need all ranks of the job, or agree on
    its name by how many groups a rank has, which ranks need not have in common.
    """
    prefix = dist.PrefixStore(name, store)
    limit = datetime.timedelta(seconds=timeout)
    return Lane(dist.ProcessGroupGloo(prefix, host, hosts, limit))
