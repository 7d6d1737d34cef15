"""The connection of one rank of every host. Over Gloo: for CPU tensors, and for CUDA tensors by
copies through the host."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

# Codes for a lost rank, and for a timeout.
GONE, LATE = -1, -2

# Seconds between polls whether the link has been closed.
_SLICE = 0.02


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


class Link(ABC):
    """Connects one rank of every host; a rank in the link is the index of its host.

    All tensors are contiguous, and on the link's device. Every method raises LinkError if another
    rank is gone or late, and RuntimeError if this link is closed meanwhile.

    On CUDA operations are ordered by the current stream. If one fails after its method has
    returned, all bits of its result are set, and check() raises the error.
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
        """Raise errors of operations that failed after their method returned."""
        return

    @abstractmethod
    def close(self) -> None:
        """Disconnect after the operations in progress."""

    @abstractmethod
    def abort(self) -> None:
        """Disconnect at once."""


class GlooLink(Link):
    """A link whose operations wait until they are done; other hosts soon notice a disconnect.

    Args:
        gloo: a ``ProcessGroupGloo`` of one rank per host; owned.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo: Any = gloo
        self._size = gloo.size()
        self._pending: Any = None  # The operation in progress.
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
            return  # A forked child has no Gloo threads to end.
        with self._lock:
            gloo, self._gloo = self._gloo, None
        # Destroying Gloo waits for the pending operation, up to its timeout: do so in a thread.
        if gloo is not None and self._pending is not None:
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
        """Run ``call``; returns Gloo's error message, or "". The exception is dropped, as its
        traceback would keep the connections open."""
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
            work.wait()  # On CUDA this also makes the current stream wait for Gloo's copies back.
        except RuntimeError as error:
            return str(error)
        return ""


def _outlive(gloo: Any, work: Any) -> None:
    """Hold ``gloo`` until ``work`` has ended."""
    with contextlib.suppress(RuntimeError):
        work.wait()
