"""How ranks on several hosts agree on each collective, and how failures end the communicator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pipekernels.comm.backend import CpuBackend
from pipekernels.comm.errors import PeerError
from pipekernels.comm.hosts.call import Call
from pipekernels.comm.hosts.host_map import HostMap
from pipekernels.comm.hosts.link import GONE, LATE, Link, LinkError


class _Failure(NamedTuple):
    """Why a communicator ended. Not the exception itself, whose traceback would keep tensors."""

    message: str
    by_peer: bool
    rank: int | None


class Agreement:
    """Starts a collective only if all ranks call the same one.

    At the start of a collective the ranks exchange descriptions of their calls. So different calls
    are found before data move, and no rank leaves a collective before all have entered it.

    Args:
        local: the backend over the ranks of this host; owned.
        host_map: of all ranks.
        link: the link of this rank's position, if any; owned.
        timeout: seconds that a call waits for one in another thread.
    """

    def __init__(
        self, local: CpuBackend, host_map: HostMap, link: Link | None, timeout: float
    ) -> None:
        self._local = local
        self._host_map = host_map
        self._link = link
        self._timeout = timeout
        self._places = torch.tensor(host_map.places, device="cpu")
        self._turn = threading.Lock()  # Held by each collective.
        self._failure: _Failure | None = None

    @contextlib.contextmanager
    def collective(self, call: Call) -> Iterator[None]:
        """Runs its body as one collective, once all ranks have made the same ``call``.

        Raises:
            ValueError: the ranks call different collectives; the communicator stays usable.
            PeerError, TimeoutError: also for a LinkError in the body.
        """
        if not self._turn.acquire(timeout=self._timeout):
            raise TimeoutError(
                "another thread has been in a collective of this communicator for "
                f"{self._timeout:g} s (its timeout)"
            )
        try:
            self._check_usable()
            with self._failing(str(call)):
                calls = self._exchange(call)
            if len(set(calls)) > 1:
                text = ", ".join(f"rank {rank} {other}" for rank, other in enumerate(calls))
                if len({other._replace(shape=0) for other in calls}) == 1:
                    text += ", but of different shapes"
                raise ValueError(f"the ranks call different collectives: {text}")
            with self._failing(str(call)):
                yield
        finally:
            self._turn.release()

    def _check_usable(self) -> None:
        """Raise PeerError or RuntimeError if an error has ended the communicator."""
        if self._failure is None:
            return
        message, by_peer, rank = self._failure
        message = f"this communicator cannot be used after a failure ({message}); make a new one"
        raise PeerError(message, rank) if by_peer else RuntimeError(message)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Ends the communicator if its body raises, so that no peer waits for this rank. ``what``
        describes the body, for errors."""
        try:
            yield
        except (LinkError, PeerError, TimeoutError) as error:
            told = self._explain(error, what)
            by_peer = isinstance(told, PeerError)
            self._failure = _Failure(str(told), by_peer, getattr(told, "rank", None))
            self.abort()
            try:
                raise told from None
            finally:
                del told  # Break the reference cycle of the error and this frame.
        except BaseException:  # The communicator was closed, or KeyboardInterrupt.
            self.abort()
            raise

    def close(self) -> None:
        """Leave."""
        self._local.close()
        self._close_link()

    def abort(self) -> None:
        """Leave, and tell the peers that an error is the reason."""
        self._local.abort()
        self._close_link()

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _exchange(self, call: Call) -> list[Call]:
        """The calls of all ranks, in rank order."""
        host_map = self._host_map
        own = torch.tensor(call, device="cpu")
        block = torch.zeros(host_map.most, len(call), dtype=torch.int64, device="cpu")
        self._local.all_gather(own, block)
        shape = (len(host_map.hosts), *block.shape)
        table = torch.empty(shape, dtype=torch.int64, device="cpu")
        reason = "reported by the rank on this host that owns the link"
        if host_map.position == 0:
            assert self._link is not None
            try:
                table = self._link.all_gather(block)
            except LinkError as error:  # Report it to the ranks of this host in the broadcast.
                reason = error.reason
                table.fill_(LATE if error.late else GONE)
        self._local.broadcast(table, 0)
        if table[0, 0, 0] < 0:  # GONE or LATE in place of an operation.
            raise LinkError(reason, late=bool(table[0, 0, 0] == LATE))
        return [Call(*row) for row in table.flatten(0, 1)[self._places].tolist()]

    def _explain(
        self, error: LinkError | PeerError | TimeoutError, what: str
    ) -> PeerError | TimeoutError:
        """``error`` with the ranks of the whole communicator instead of those of a host or link."""
        if isinstance(error, LinkError):
            message = f"{error}, in {what}"
            return TimeoutError(message) if error.late else PeerError(message, None)
        numbers = ", ".join(f"{i} is rank {rank}" for i, rank in enumerate(self._host_map.members))
        message = f"in {what}, counting the ranks of this host alone ({numbers}): {error}"
        if isinstance(error, TimeoutError):
            return TimeoutError(message)
        assert error.rank is not None, "shared memory knows its ranks"
        return PeerError(message, self._host_map.members[error.rank])
