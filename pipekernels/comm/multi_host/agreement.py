"""How ranks on several hosts agree on each collective, and how failures end the communicator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pipekernels.comm.errors import PeerError
from pipekernels.comm.multi_host.hosts import HostMap, Link, LinkError
from pipekernels.comm.shared_memory import SharedMemoryBackend
from pipekernels.comm.tensors import shape_digest

_LONGEST = 128  # Bytes that a description of a call takes, at most 110 of them.
# First bytes of a description in place of letters: a rank of another host is lost, or late.
_GONE, _LATE = 1, 2


def describe(name: str, tensor: Tensor | None, *arguments: str) -> str:
    """A call of a collective, as errors show it."""
    if tensor is None:
        return f"{name}()"
    what = f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
    return f"{name}({', '.join([what, *arguments])})"


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
        self, local: SharedMemoryBackend, host_map: HostMap, link: Link | None, timeout: float
    ) -> None:
        self._local = local
        self._host_map = host_map
        self._link = link
        self._timeout = timeout
        self._turn = threading.Lock()  # Held by each collective.
        # Makes the error of every call after one that has ended the communicator. Not that error
        # itself, whose traceback would keep tensors.
        self._failure: Callable[[], Exception] | None = None

    @contextlib.contextmanager
    def collective(self, name: str, tensor: Tensor | None, *arguments: str) -> Iterator[None]:
        """Runs its body as one collective, once all ranks have made the same call.

        Raises:
            ValueError: the ranks call different collectives; the communicator stays usable.
            PeerError, TimeoutError: also for a LinkError in the body.
        """
        call = describe(name, tensor, *arguments)
        if not self._turn.acquire(timeout=self._timeout):
            raise TimeoutError(
                "another thread has been in a collective of this communicator for "
                f"{self._timeout:g} s (its timeout)"
            )
        try:
            if self._failure is not None:
                raise self._failure()
            with self._ends_communicator_on_error(call):
                calls = self._exchange(call, 0 if tensor is None else shape_digest(tensor))
            if calls:  # They differ. Nothing has moved yet, so the communicator stays usable.
                text = ", ".join(f"rank {rank} {other}" for rank, other in enumerate(calls))
                if len(set(calls)) == 1:
                    text += ", but of different shapes"
                raise ValueError(f"the ranks call different collectives: {text}")
            with self._ends_communicator_on_error(call):
                yield  # All ranks are in the body, and peers may wait there for this one.
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _ends_communicator_on_error(self, call: str) -> Iterator[None]:
        """Ends the communicator if its body raises, so that no peer waits for this rank."""
        try:
            yield
        except (LinkError, PeerError, TimeoutError) as error:
            # Peers learn it at once, by the closed memory and link, and not by their timeouts.
            told = self._explain(error, call)
            text = f"this communicator cannot be used after a failure ({told}); make a new one"
            self._failure = partial(RuntimeError, text)
            if isinstance(told, PeerError):
                self._failure = partial(PeerError, text, told.rank)
            self.close(abort=True)
            try:
                raise told from None
            finally:
                del told  # Break the reference cycle of the error and this frame.
        except BaseException:  # The communicator was closed, or KeyboardInterrupt.
            self.close(abort=True)
            raise

    def close(self, *, abort: bool = False) -> None:
        """Leave; ``abort`` tells the peers that an error is the reason."""
        leave = self._local.abort if abort else self._local.close
        leave()
        if self._link is not None:
            self._link.close()

    def _exchange(self, call: str, shape: int) -> list[str]:
        """The calls of all ranks, in rank order; empty if they are the same, shapes included."""
        host_map = self._host_map
        description = f"{call}\n{shape}".encode().ljust(_LONGEST)
        row = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        # As a collective: inside each host, between the first ranks of hosts, inside again. The
        # block of a host with fewer ranks ends with zeros, as links take equal shapes.
        block = torch.zeros(host_map.most, _LONGEST, dtype=torch.uint8, device="cpu")
        self._local.all_gather(row, block)
        table = block.new_empty((len(host_map.hosts), *block.shape))
        reason = "reported by the rank on this host that owns the link"
        if host_map.position == 0:
            assert self._link is not None
            try:
                table = self._link.all_gather(block)
            except LinkError as error:  # Report it to the ranks of this host in the broadcast.
                reason = error.reason
                table.fill_(_LATE if error.late else _GONE)
        self._local.broadcast(table, 0)
        if (status := int(table[0, 0, 0])) in (_GONE, _LATE):
            raise LinkError(reason, late=status == _LATE)
        rows = table.flatten(0, 1)[host_map.places]
        if rows.eq(row).all():
            return []
        return [bytes(each).decode().partition("\n")[0] for each in rows.tolist()]

    def _explain(
        self, error: LinkError | PeerError | TimeoutError, call: str
    ) -> PeerError | TimeoutError:
        """``error`` with the ranks of the whole communicator instead of those of a host or link."""
        if isinstance(error, LinkError):
            message = f"{error}, in {call}"
            return TimeoutError(message) if error.late else PeerError(message, None)
        numbers = ", ".join(f"{i} is rank {rank}" for i, rank in enumerate(self._host_map.members))
        message = f"in {call}, counting the ranks of this host alone ({numbers}): {error}"
        if isinstance(error, TimeoutError):
            return TimeoutError(message)
        assert error.rank is not None, "shared memory knows its ranks"
        return PeerError(message, self._host_map.members[error.rank])
