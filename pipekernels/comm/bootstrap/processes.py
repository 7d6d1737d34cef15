"""How processes of one host share memory.

The first rank creates a memory file and passes its descriptor to each peer over a Unix socket in
the abstract namespace. So nothing has a name in the file system, and nothing remains when the
processes end. All other information is exchanged over the rendezvous. Ranks on several hosts share
no memory: they learn only that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pipekernels import _backend
from pipekernels.comm.bootstrap.rendezvous import (
    Deadline,
    Rendezvous,
    host_identity,
    of_color,
    start_time,
)
from pipekernels.comm.errors import PeerError

_RETRY = 0.002  # Seconds between attempts to connect to a socket whose queue is full.
_LOOK = 0.2  # Seconds between looks whether processes still run.


@dataclass(frozen=True)
class _Process:
    host: tuple[str, ...]
    pid: int
    address: str  # Of its socket.
    color: int | None = 0
    key: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\0pipekernels-[0-9a-f]{32}", self.address):
            raise ValueError(f"{self.address!r} is not the address of a rank")


class JoinedRank(NamedTuple):
    """One rank of a new communicator, which owns ``pidfds``."""

    rank: int
    world_size: int
    hosts: int  # That the ranks are on. If there are several, no memory is shared.
    name: str  # The same on all ranks, and unique.
    segment: Any  # The memory that the ranks share, or None.
    pidfds: list[int]  # For every rank, -1 for this one.


def join_processes(
    rendezvous: Rendezvous, timeout: float, color: int | None = 0, key: int = 0
) -> JoinedRank | None:
    """Join the ranks of ``rendezvous`` that give the same ``color``, ordered by ``key``, then rank.

    A collective over the rendezvous. Returns ``None`` for a rank without a colour. If it fails on
    one rank it fails on all ranks of the colour; if the first exchange fails, on all ranks.
    ``timeout`` limits each wait of the communicator, and joining, unless the rendezvous has a
    deadline for that.
    """
    with contextlib.ExitStack() as stack:
        # 1. Every rank introduces itself: its host, its process and the address of a socket.
        introduction: _Process | str
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            address = f"\0pipekernels-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(rendezvous.world_size)
            introduction = _Process(host_identity(), os.getpid(), address, color, key)
        except OSError as error:
            introduction = problem_of(rendezvous.rank, error)
        either = cast("type[_Process | str]", _Process | str)
        everyone = rendezvous.all_gather(introduction, either)
        raise_join_failure(other for other in everyone if isinstance(other, str))
        if color is None:
            rendezvous.all_gather("", str)
            return None
        deadline = rendezvous.deadline or Deadline(timeout)
        introduced = [other for other in everyone if isinstance(other, _Process)]
        ranks = of_color([(other.color, other.key) for other in introduced], color)
        processes = [introduced[rank] for rank in ranks]
        rank, hosts = ranks.index(rendezvous.rank), _count_hosts(processes)

        # 2. The ranks of one host get the same memory, over the socket.
        undo = stack.enter_context(contextlib.ExitStack())
        segment = None
        pidfds: list[int] = []
        problem = ""
        try:
            if hosts == 1:
                soon = Deadline(0.75 * deadline.left())  # Leaves time to tell of a timeout.
                module = _backend.load()
                fd = _share(listener, processes, rank, soon)
                try:
                    segment = module.Segment(fd, len(processes))
                finally:
                    os.close(fd)  # The mapping holds the memory.
                # By a pidfd the extension sees the end of a process at once, without reused pids.
                for peer, process in enumerate(processes):
                    pidfds.append(-1 if peer == rank else module.open_pidfd(process.pid))
                    if pidfds[-1] >= 0:
                        undo.callback(os.close, pidfds[-1])
        except Exception as error:  # noqa: BLE001 (Sent to the peers.)
            problem = problem_of(rank, error)
            listener.close()  # Peers that wait for the memory stop waiting.
        # 3. All learn whether all have succeeded; else what was opened is closed.
        answers = rendezvous.all_gather(problem, str)
        problems = [answers[member] for member in ranks]
        if any(problems):
            segment = None  # Else the traceback would keep it alive.
        raise_join_failure(problems)
        undo.pop_all()
    return JoinedRank(rank, len(ranks), hosts, processes[0].address[1:], segment, pidfds)


def problem_of(rank: int, error: Exception) -> str:
    """The message for the other ranks about an error that keeps ``rank`` from joining."""
    return f"rank {rank}: {type(error).__name__}: {error}"


def raise_join_failure(problems: Iterable[str]) -> None:
    """Raise RuntimeError if any rank has a problem."""
    found = [problem for problem in problems if problem]
    if found:
        raise RuntimeError(f"the ranks cannot be joined: {'; '.join(found)}")


def _count_hosts(processes: list[_Process]) -> int:
    """The number of hosts. RuntimeError if a process has two ranks."""
    ranks: dict[tuple[Any, ...], int] = {}
    for rank, process in enumerate(processes):
        if ranks.setdefault((process.host, process.pid), rank) != rank:
            raise RuntimeError(
                f"rank {rank} shares process {process.pid} with another rank; "
                "use Communicator.threads() for ranks that are threads"
            )
    return len({process.host for process in processes})


def _share(
    listener: socket.socket, processes: list[_Process], rank: int, deadline: Deadline
) -> int:
    """The descriptor of the memory that the ranks share."""
    if rank > 0:
        return _receive(processes[0], 0, deadline)
    waiting = {process.pid: peer for peer, process in enumerate(processes) if peer > 0}
    return _hand_out(listener, waiting, deadline)


def _hand_out(listener: socket.socket, waiting: dict[int, int], deadline: Deadline) -> int:
    """Create memory and send its descriptor to the processes in ``waiting`` (ranks by pid)."""
    fd: int = _backend.load().Segment.create(len(waiting) + 1)
    try:
        while waiting:
            if deadline.left() == 0:
                raise TimeoutError(
                    f"rank(s) {', '.join(map(str, waiting.values()))} did not fetch the shared "
                    f"memory within {deadline.seconds:.3g} s"
                )
            dead = [rank for pid, rank in waiting.items() if start_time(pid) is None]
            if dead:
                raise PeerError(f"rank {dead[0]} has died", dead[0])
            # Any user can connect. Nothing is read from a connection, so none can block the others;
            # only processes of this user that are waited for get the descriptor.
            listener.settimeout(min(deadline.for_socket(), _LOOK))
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    pid = _peer_pid(connection)
                    if pid in waiting:
                        socket.send_fds(connection, [b"\0"], [fd])
                        del waiting[pid]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _receive(first: _Process, rank: int, deadline: Deadline) -> int:
    """The descriptor of the memory, from the process ``first``, which is ``rank``."""
    # The kernel names the process at the other end: nobody else can pass memory.
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            _connect(connection, first.address, deadline)
            if _peer_pid(connection) != first.pid:
                raise RuntimeError("another process listens on the socket of the first rank")
            connection.settimeout(deadline.for_socket())
            _, fds, flags, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise TimeoutError(
                f"rank {rank} did not hand out the shared memory within {deadline.seconds:.3g} s"
            ) from None
    if flags & socket.MSG_CTRUNC:
        raise RuntimeError("there is no file descriptor left for the shared memory (see ulimit -n)")
    if not fds:
        raise RuntimeError("the first rank closed the connection")
    return fds[0]


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connect; retry while the listener's queue is full."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:  # Unlike TCP, a Unix socket cannot be waited for until it connects.
            if deadline.left() == 0:
                raise TimeoutError from None
        time.sleep(_RETRY)


def _peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end, or ``None`` if it belongs to another user."""
    # struct ucred, as of the time of listen() or connect(): a process cannot choose it.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid if uid == os.geteuid() else None
