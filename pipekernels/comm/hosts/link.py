"""What connects one rank of every host; over Gloo: for CPU tensors, and CUDA ones by way of the
host."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

# In a number: why there is nothing from other hosts.
GONE, LATE = -1, -2

# Seconds between looks whether the link has been closed.
_SLICE = 0.02


class LinkError(RuntimeError):
    """A rank of another host is gone, or late; which one, only the transport knows.

    Attributes:
        reason: how that was noticed.
        late: whether it has not arrived in time.
    """

    def __init__(self, reason: str, *, late: bool) -> None:
        what = "did not arrive in time" if late else "is gone"
        super().__init__(f"a rank of another host {what} ({reason})")
        self.reason = reason
        self.late = late


class Link(ABC):
    """One rank of every host; the rank in the link is the index of the host.

    All tensors are contiguous, and on the link's device. Every method raises LinkError if another
    rank is gone or late, and RuntimeError if this link is closed meanwhile.

    On CUDA everything happens in the order of the current stream. If a method returns before it is
    done, and then fails, all bits are set in what it was to fill, and check() raises the error.
    """

    @abstractmethod
    def sum(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over the hosts, in place; every host receives the same bits."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[hosts, *tensor.shape]``: the tensors of all hosts."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy ``tensor`` of host ``root`` to all hosts, in place."""

    def check(self) -> None:
        """Raise what has gone wrong since the above returned."""
        return

    @abstractmethod
    def close(self) -> None:
        """Hang up, when what was begun is done."""

    @abstractmethod
    def abort(self) -> None:
        """Hang up at once."""


class GlooLink(Link):
    """Waits in every operation until it is done; the other hosts notice soon when this one hangs
    up.

    Args:
        gloo: a ``ProcessGroupGloo`` of one rank per host; owned.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo: Any = gloo
        self._size = gloo.size()
        self._pending: Any = None  # What Gloo is at work on.
        self._lock = threading.Lock()  # Held to start an operation, or to close.
        self._process = os.getpid()

    def sum(self, tensor: Tensor) -> None:
        self._run(lambda gloo: gloo.allreduce([tensor]))

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self._size, *tensor.shape))
        self._run(lambda gloo: gloo.allgather([list(gathered.unbind())], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._run(lambda gloo: gloo.broadcast(tensor, root))

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # A forked child has no threads of Gloo's to end.
        with self._lock:
            gloo, self._gloo = self._gloo, None
        if gloo is not None and self._pending is not None:  # Its end may take until its timeout.
            threading.Thread(target=_outlive, args=(gloo, self._pending), daemon=True).start()

    def abort(self) -> None:
        self.close()

    def _run(self, call: Callable[[Any], Any]) -> None:
        """Start ``call(gloo)`` and wait for its end, which close() and Ctrl-C can cut short."""
        reason = self._attempt(call)
        if self._gloo is None:
            raise RuntimeError("this communicator has been closed; make a new one")
        if reason:
            late = "timed out" in reason.lower() or "timeout" in reason.lower()
            raise LinkError(reason, late=late)

    def _attempt(self, call: Callable[[Any], Any]) -> str:
        """Why Gloo has failed, or nothing; the traceback of its error would keep the
        connections."""
        ended = threading.Event()
        try:
            with self._lock:
                if self._gloo is None:
                    return ""
                self._pending = call(self._gloo)
            self._pending.get_future().then(lambda _: ended.set())
            while not ended.wait(_SLICE):
                if self._gloo is None:
                    return ""
            work, self._pending = self._pending, None
            work.wait()  # On CUDA the current stream waits too, for what Gloo copies back.
        except RuntimeError as error:
            return str(error)
        return ""


def _outlive(gloo: Any, work: Any) -> None:
    """Hold ``gloo`` until ``work`` has ended."""
    with contextlib.suppress(RuntimeError):
        work.wait()
