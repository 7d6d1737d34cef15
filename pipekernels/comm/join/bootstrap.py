"""How processes come to share memory with those of their host, and are connected to other hosts.

The first rank of each host makes a memory file and hands its descriptor to each peer over a Unix
socket in the abstract namespace, so nothing has a name in the file system, and nothing is left when
the processes end. What the ranks need to know of each other travels over a rendezvous.
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
from pathlib import Path
from typing import Any, NamedTuple

from pipekernels import _backend
from pipekernels.comm import limits as tuning
from pipekernels.comm import messages
from pipekernels.comm.deadline import Deadline
from pipekernels.comm.hosts.host_map import HostMap
from pipekernels.comm.hosts.route import Route
from pipekernels.comm.join.rendezvous import Rendezvous, late, of_color

_RETRY = 0.002  # Seconds until another attempt to connect to a socket that too many try to reach.


class _Process(NamedTuple):
    host: tuple[str, ...]
    pid: int
    address: str  # Of its socket.
    color: int | None = 0
    key: int = 0


class Seat(NamedTuple):
    """What a rank has of the communicator that it joins.

    Attributes:
        host_map: which ranks are on which host.
        segment: the memory that the ranks of this host share.
        pidfds: a pidfd for every rank of this host, -1 for this one; to be owned by the taker.
        route: to one rank of every other host, if there are any, see
            :mod:`pipekernels.comm.hosts.steps`; its link is to be owned by the taker.
    """

    host_map: HostMap
    segment: Any
    pidfds: list[int]
    route: Route | None


def join_processes(
    rendezvous: Rendezvous, timeout: float, color: int | None = 0, key: int = 0
) -> Seat | None:
    """Join the ranks of ``rendezvous`` that give the same ``color``, ordered by ``key``, then rank.

    A collective over the rendezvous. ``None`` for a rank without a colour. Fails on all ranks of a
    colour if it fails on one, and on all ranks if one cannot even introduce itself.

    Args:
        rendezvous: all ranks.
        timeout: seconds that each wait of the communicator takes at most; and joining, unless the
            rendezvous has a deadline for it.
        color: see above.
        key: see above.
    """
    with contextlib.ExitStack() as stack:
        introduction: _Process | str
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            address = f"\0pipekernels-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(rendezvous.world_size)
            introduction = _Process(host_identity(), os.getpid(), address, color, key)
        except OSError as error:
            introduction = problem_of(rendezvous.rank, error)
        everyone = rendezvous.all_gather(introduction, _introduction)
        raise_join_failure(other for other in everyone if isinstance(other, str))
        if color is None:
            rendezvous.all_gather("", messages.text)
            return None
        deadline = rendezvous.deadline or Deadline(timeout)
        introduced = [other for other in everyone if isinstance(other, _Process)]
        ranks = of_color([(other.color, other.key) for other in introduced], color)
        processes = [introduced[rank] for rank in ranks]
        rank = ranks.index(rendezvous.rank)
        _check_distinct(processes)
        host_map = HostMap(_group_by_host(processes), rank)

        undo = stack.enter_context(contextlib.ExitStack())
        segment, pidfds, route, problem = None, [], None, ""
        try:
            soon = deadline.early()  # So that the peers still hear of what takes too long.
            module = _backend.load()
            fd = _share(listener, processes, host_map, soon)
            try:
                segment = module.Segment(fd, len(host_map.members))
            finally:
                os.close(fd)
            for member in host_map.members:
                pidfds.append(-1 if member == rank else module.open_pidfd(processes[member].pid))
                if pidfds[-1] >= 0:
                    undo.callback(os.close, pidfds[-1])
            route = _connect_hosts(rendezvous, host_map, processes[0].address, timeout, soon)
            if route is not None:
                undo.callback(route.link.close)
        except Exception as error:  # noqa: BLE001 (The peers must hear of it.)
            problem = problem_of(rank, error)
            listener.close()  # Who waits for the memory need not wait any longer.
        problems = rendezvous.all_gather(problem, messages.text)
        problems = [problems[member] for member in ranks]
        if any(problems):
            segment = None  # Not to be kept by the traceback.
        raise_join_failure(problems)
        undo.pop_all()
    return Seat(host_map, segment, pidfds, route)


def problem_of(rank: int, error: Exception) -> str:
    """What the other ranks hear of an error that keeps ``rank`` from joining them."""
    return f"rank {rank}: {type(error).__name__}: {error}"


def raise_join_failure(problems: Iterable[str]) -> None:
    """Raise RuntimeError if any rank has a problem."""
    found = [problem for problem in problems if problem]
    if found:
        raise RuntimeError(f"the ranks cannot be joined: {'; '.join(found)}")


def host_identity() -> tuple[str, ...]:
    """Equal for two processes if they can see each other's pids and abstract sockets.

    And if they are of one user, since nobody else is handed the memory. The environment variable
    ``PIPEKERNELS_HOST_ID`` tells processes apart that would be equal.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    override = os.environ.get("PIPEKERNELS_HOST_ID", "")
    return (socket.gethostname(), boot_id, *namespaces, str(os.geteuid()), override)


def _group_by_host(processes: list[_Process]) -> list[list[int]]:
    """The ranks on each host; hosts in the order of their first ranks."""
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, process in enumerate(processes):
        hosts.setdefault(process.host, []).append(rank)
    return list(hosts.values())


def _check_distinct(processes: list[_Process]) -> None:
    for rank, process in enumerate(processes):
        if (process.host, process.pid) in [(p.host, p.pid) for p in processes[:rank]]:
            raise RuntimeError(
                f"rank {rank} shares process {process.pid} with another rank; "
                "use Communicator.threads() for ranks that are threads"
            )


def _connect_hosts(
    rendezvous: Rendezvous, host_map: HostMap, name: str, timeout: float, deadline: Deadline
) -> Route | None:
    """To the ranks that have the same position on each host, where all have one."""
    if len(host_map.hosts) == 1 or host_map.position >= host_map.links:
        return None
    store = rendezvous.store
    assert store is not None, "only processes of one host do without a store"
    name = f"{name[1:]}/{host_map.position}"  # Nobody else has it: a socket's address is unique.
    # Connecting has the timeout of a lane's operations: it begins when nobody is late any more.
    keys = [f"{name}/{host}" for host in range(len(host_map.hosts))]
    store.set(keys[host_map.host], "")
    absent = [str(host_map.hosts[host][host_map.position]) for host in late(store, keys, deadline)]
    if absent:
        raise TimeoutError(
            f"rank(s) {', '.join(absent)} did not come to connect the hosts within "
            f"{deadline.seconds:.3g} s"
        )
    hosts = len(host_map.hosts)
    return Route(store, name, host_map.host, hosts, timeout, rendezvous.cuda_backend)


def _share(
    listener: socket.socket, processes: list[_Process], host_map: HostMap, deadline: Deadline
) -> int:
    """The descriptor of the memory for the ranks of this host."""
    first, *others = host_map.members
    if host_map.rank == first:
        return _hand_out(listener, {processes[member].pid: member for member in others}, deadline)
    return _receive(processes[first], first, deadline)


def _hand_out(listener: socket.socket, waiting: dict[int, int], deadline: Deadline) -> int:
    """Give new memory to the processes ``waiting``, their ranks by pid; its descriptor.

    Any user can connect. Nothing is read from a connection, so none holds up the others; whoever is
    not waited for goes away empty-handed.
    """
    world_size = len(waiting) + 1
    fd: int = _backend.load().Segment.create(world_size, tuning.one_shot_bytes(world_size))
    try:
        while waiting:
            if deadline.left() == 0:
                raise TimeoutError(
                    f"rank(s) {', '.join(map(str, waiting.values()))} did not come for the shared "
                    f"memory within {deadline.seconds:.3g} s"
                )
            listener.settimeout(deadline.for_socket())
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
    """The descriptor of the memory that the ``first`` process of this host, ``rank``, hands out."""
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
        raise RuntimeError("the first rank of this host has hung up")
    return fds[0]


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connect, also where others have filled the queue of connections at the moment."""
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if deadline.left() == 0:
                raise TimeoutError from None
        time.sleep(_RETRY)


def _introduction(record: Any) -> _Process | str:
    """The inverse of JSON: a process, or what keeps it from being one; ValueError if neither."""
    if type(record) is str:
        return record
    host, *rest = messages.fields(record, list, int, str, (int, type(None)), int)
    process = _Process(tuple(messages.texts(host)), *rest)
    if not re.fullmatch(r"\0pipekernels-[0-9a-f]{32}", process.address):
        raise ValueError(f"{process.address!r} is not the address of a rank")
    return process


def _peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end, or ``None`` if it belongs to another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid if uid == os.geteuid() else None
