"""Collectives over several hosts: shared memory inside each host, lanes between them.

With ``P`` ranks on the host that has the fewest, the ranks at positions ``0 .. P - 1`` of each host
carry a ``P``-th of the data each, over a lane of their own::

    host 0    rank a --- rank b     rank c      shared memory
                |          |
    host 1    rank d --- rank e                 shared memory
              lane 0     lane 1
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipekernels.comm.codes import ALGORITHMS, MOVABLE, REDUCTIONS
from pipekernels.comm.errors import PeerError
from pipekernels.comm.lane import Lane, LaneError

_DTYPES = {code: dtype for dtype, code in MOVABLE.items()}
_BYTES, _INTEGERS = MOVABLE[torch.uint8], MOVABLE[torch.int64]
_SUM, _AVG, _MAX = REDUCTIONS["sum"], REDUCTIONS["avg"], REDUCTIONS["max"]
# In place of an operation: why there is no answer from other hosts.
_GONE, _LATE = -1, -2

# Seconds that the ranks of a host wait longer for each other than for other hosts, so that those
# that listen to these can say what they have heard.
GRACE = 1.0

# Whatever the default device is.
_empty = functools.partial(torch.empty, device="cpu")
_zeros = functools.partial(torch.zeros, device="cpu")

_OPERATIONS = ["barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast"]


class _Call(NamedTuple):
    """What a rank calls, as numbers; equal on all ranks."""

    operation: int
    elements: int = 0  # Of this rank's input.
    dtype: int = _BYTES
    reduction: int = _SUM
    algorithm: int = 0
    root: int = 0
    shape: int = 0

    def __str__(self) -> str:
        name = _OPERATIONS[self.operation]
        arguments = [f"{self.elements} x {str(_DTYPES[self.dtype]).removeprefix('torch.')}"]
        if name in ("all_reduce", "reduce_scatter"):
            arguments.append(list(REDUCTIONS)[self.reduction])
        if name == "all_reduce":
            arguments.append(list(ALGORITHMS)[self.algorithm])
        if name == "broadcast":
            arguments.append(f"src={self.root}")
        return f"{name}({', '.join(arguments) if name != 'barrier' else ''})"


class _Failure(NamedTuple):
    """What has ended a communicator. Not the error itself, whose traceback holds tensors."""

    message: str
    by_peer: bool
    rank: int | None


class Hosts:
    """One rank's end of a communicator over several hosts; has the methods of ``_C.Communicator``.

    A collective begins with an exchange of what the ranks call, so that different calls are found
    before any data move, and that no rank leaves a collective before all have entered it.

    Args:
        local: a ``_C.Communicator`` over the ranks of this host; owned.
        hosts: the ranks on each host.
        host: the index of this one.
        position: of this rank among those of its host.
        lane: that of this position, ``None`` if there is none; owned.
        timeout: seconds that a call waits for one in another thread.
    """

    def __init__(
        self,
        local: Any,
        hosts: list[list[int]],
        host: int,
        position: int,
        lane: Lane | None,
        timeout: float,
    ) -> None:
        self._local = local
        self._hosts = hosts
        self._host = host
        self._position = position
        self._lane = lane
        self._timeout = timeout
        self._lanes = min(len(members) for members in hosts)
        self._most = max(len(members) for members in hosts)  # Ranks on one host.
        self._world_size = sum(len(members) for members in hosts)
        # In a table [hosts, most], flattened: where each rank is.
        places = {
            rank: host * self._most + position
            for host, members in enumerate(hosts)
            for position, rank in enumerate(members)
        }
        order = [places[rank] for rank in range(self._world_size)]
        self._places = torch.tensor(order, device="cpu")
        self._turn = threading.Lock()  # Held by each collective.
        self._failure: _Failure | None = None

    # ---- the methods of _C.Communicator ------------------------------------------------------------

    def all_reduce(
        self, data: int, count: int, dtype: int, reduction: int, algorithm: int, shape: int = 0
    ) -> None:
        _check_reduction(dtype, reduction)
        with self._collective(_Call(1, count, dtype, reduction, algorithm, 0, shape)):
            if count > 0:
                tensor = _tensor_at(data, count, dtype)
                tensor.copy_(self._reduced(tensor, reduction))

    def all_reduce_tensor(self, tensor: Tensor, reduction: int, algorithm: int) -> bool:
        return False

    def reduce_scatter(
        self, input: int, output: int, count: int, dtype: int, reduction: int, shape: int = 0
    ) -> None:
        _check_reduction(dtype, reduction)
        whole = count * self._world_size
        with self._collective(_Call(2, whole, dtype, reduction, shape=shape)):
            if count > 0:
                reduced = self._reduced(_tensor_at(input, whole, dtype), reduction)
                start = self._members[self._position] * count
                _tensor_at(output, count, dtype).copy_(reduced[start : start + count])

    def all_gather(self, input: int, output: int, count: int, dtype: int, shape: int = 0) -> None:
        with self._collective(_Call(3, count, dtype, shape=shape)):
            if count > 0:
                size = count * _DTYPES[dtype].itemsize
                gathered = self._gathered(_tensor_at(input, size, _BYTES))
                _tensor_at(output, self._world_size * size, _BYTES).copy_(gathered.flatten())

    def broadcast(self, data: int, count: int, dtype: int, root: int, shape: int = 0) -> None:
        if not 0 <= root < self._world_size:
            raise ValueError(f"src must be a rank in 0..{self._world_size - 1}, got {root}")
        with self._collective(_Call(4, count, dtype, root=root, shape=shape)):
            if count > 0:
                size = count * _DTYPES[dtype].itemsize
                self._copy_from(_tensor_at(data, size, _BYTES), root)

    def barrier(self) -> None:
        with self._collective(_Call(0)):
            pass

    def allocate(self, size: int) -> Any:
        return self._local.allocate(size)

    def close(self) -> None:
        self._local.close()
        self._hang_up()

    def abort(self) -> None:
        self._local.abort()
        self._hang_up()

    # ---- the steps of a collective -----------------------------------------------------------------

    @property
    def _members(self) -> list[int]:
        """The ranks of this host."""
        return self._hosts[self._host]

    def _reduced(self, tensor: Tensor, reduction: int) -> Tensor:
        """``tensor`` reduced over all ranks: a part per lane, reduced in this host, then beyond."""
        part = -(-tensor.numel() // self._lanes)
        # Ranks without a lane reduce padding.
        padded = self._shared(len(self._members) * part, tensor.dtype)
        padded[: tensor.numel()] = tensor
        padded[tensor.numel() :] = 0
        mine = self._shared(part, tensor.dtype)
        inside = _SUM if reduction == _AVG else reduction
        code = MOVABLE[tensor.dtype]
        self._local.reduce_scatter(padded.data_ptr(), mine.data_ptr(), part, code, inside)
        if self._lane is not None:
            if inside == _SUM:
                self._lane.sum(mine)
            else:  # Gathered, since Gloo may lose a NaN.
                parts = self._lane.all_gather(mine)
                mine.copy_(parts.amax(0) if reduction == _MAX else parts.amin(0))
            if reduction == _AVG:
                mine /= self._world_size
        self._local.all_gather(mine.data_ptr(), padded.data_ptr(), part, code)
        return padded[: tensor.numel()]

    def _gathered(self, data: Tensor) -> Tensor:
        """``[world_size, data.numel()]``: the bytes of all ranks."""
        size, hosts = data.numel(), len(self._hosts)
        part = -(-self._most * size // self._lanes)
        block = _zeros(self._lanes * part, dtype=torch.uint8)  # Of this host.
        self._local.all_gather(data.data_ptr(), block.data_ptr(), size, _BYTES)
        mine = self._shared(hosts * part, torch.uint8)
        if self._lane is not None:
            start = self._position * part
            mine.copy_(self._lane.all_gather(block[start : start + part]).flatten())
        parts = _empty(len(self._members), hosts, part, dtype=torch.uint8)
        self._local.all_gather(mine.data_ptr(), parts.data_ptr(), hosts * part, _BYTES)
        blocks = parts[: self._lanes].transpose(0, 1).reshape(hosts, self._lanes * part)
        return blocks[:, : self._most * size].reshape(-1, size)[self._places]

    def _copy_from(self, data: Tensor, root: int) -> None:
        """Copy the bytes of rank ``root`` to all ranks, in place."""
        host = next(h for h, members in enumerate(self._hosts) if root in members)
        if host == self._host:
            position = self._members.index(root)
            self._local.broadcast(data.data_ptr(), data.numel(), _BYTES, position)
        part = -(-data.numel() // self._lanes)
        padded = _zeros(len(self._members) * part, dtype=torch.uint8)
        padded[: data.numel()] = data
        mine = padded[self._position * part :][:part]
        if self._lane is not None:
            self._lane.broadcast(mine, host)
        if host != self._host:
            mine = mine.clone()
            self._local.all_gather(mine.data_ptr(), padded.data_ptr(), part, _BYTES)
            data.copy_(padded[: data.numel()])

    def _exchange(self, call: _Call) -> list[_Call]:
        """What all ranks call, in rank order."""
        own = torch.tensor(call, device="cpu")
        block = _zeros(self._most, len(call), dtype=torch.int64)
        self._local.all_gather(own.data_ptr(), block.data_ptr(), own.numel(), _INTEGERS)
        table = _empty(len(self._hosts), *block.shape, dtype=torch.int64)
        reason = "as its peer here has noticed"
        if self._position == 0:
            assert self._lane is not None
            try:
                table = self._lane.all_gather(block)
            except LaneError as error:  # The ranks of this host must hear of it.
                reason = error.reason
                table.fill_(_LATE if error.late else _GONE)
        self._local.broadcast(table.data_ptr(), table.numel(), _INTEGERS, 0)
        if table[0, 0, 0] < 0:
            raise LaneError(reason, late=bool(table[0, 0, 0] == _LATE))
        return [_Call(*row) for row in table.flatten(0, 1)[self._places].tolist()]

    def _shared(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory that the other ranks of this host read in place."""
        return torch.frombuffer(self._local.allocate(count * dtype.itemsize), dtype=dtype)

    # ---- order and failure -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, call: _Call) -> Iterator[None]:
        """Runs its body as one collective, once all ranks have made the same call."""
        if not self._turn.acquire(timeout=self._timeout):
            raise TimeoutError(
                "another thread has been in a collective of this communicator for "
                f"{self._timeout:g} s (its timeout)"
            )
        try:
            self._check_usable()
            with self._failing(call):
                calls = self._exchange(call)
            if len(set(calls)) > 1:
                text = ", ".join(f"rank {rank} {other}" for rank, other in enumerate(calls))
                if len({other._replace(shape=0) for other in calls}) == 1:
                    text += ", but of different shapes"
                raise ValueError(f"the ranks call different collectives: {text}")
            with self._failing(call):
                yield
        finally:
            self._turn.release()

    def _check_usable(self) -> None:
        if self._failure is None:
            return
        message, by_peer, rank = self._failure
        message = f"this communicator cannot be used after a failure ({message}); make a new one"
        raise PeerError(message, rank) if by_peer else RuntimeError(message)

    @contextlib.contextmanager
    def _failing(self, call: _Call) -> Iterator[None]:
        """Ends this communicator if its body raises, so that no peer waits for this rank."""
        try:
            yield
        except (LaneError, PeerError, TimeoutError) as error:
            told = self._explain(error, call)
            by_peer = isinstance(told, PeerError)
            self._failure = _Failure(str(told), by_peer, getattr(told, "rank", None))
            self.abort()
            try:
                raise told from None
            finally:
                del told  # Or it would keep this frame, which would keep it.
        except BaseException:  # Closed or interrupted.
            self.abort()
            raise

    def _explain(
        self, error: LaneError | PeerError | TimeoutError, call: _Call
    ) -> PeerError | TimeoutError:
        """``error``, from the point of view of the whole communicator."""
        if isinstance(error, LaneError):
            message = f"{error}, in {call}"
            return TimeoutError(message) if error.late else PeerError(message, None)
        numbers = ", ".join(f"{i} is rank {rank}" for i, rank in enumerate(self._members))
        message = f"in {call}, counting the ranks of this host alone ({numbers}): {error}"
        if isinstance(error, TimeoutError):
            return TimeoutError(message)
        assert error.rank is not None, "shared memory knows its ranks"
        return PeerError(message, self._members[error.rank])

    def _hang_up(self) -> None:
        if self._lane is not None:
            self._lane.close()


def _check_reduction(dtype: int, reduction: int) -> None:
    if reduction == _AVG and not _DTYPES[dtype].is_floating_point:
        raise ValueError(
            f"an average of {str(_DTYPES[dtype]).removeprefix('torch.')} is not an integer; use "
            "op='sum', or convert to a float type"
        )


def _tensor_at(address: int, count: int, dtype: int) -> Tensor:
    """The ``count`` elements at ``address``; the caller keeps them."""
    size = count * _DTYPES[dtype].itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=_DTYPES[dtype])
