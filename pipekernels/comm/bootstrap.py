"""How processes of one host come to share memory.

Rank 0 makes a memory file and hands its descriptor to each peer over a Unix socket in the abstract
namespace, so nothing has a name in the file system, and nothing is left when the processes end.
What the ranks need to know of each other travels over their ``torch.distributed`` group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pipekernels import _backend
from pipekernels.comm import tuning


class _Process(NamedTuple):
    host: tuple[str, ...]
    pid: int
    address: str  # Of the socket, on rank 0.


def join_processes(group: dist.ProcessGroup | None, timeout: float) -> tuple[Any, list[int]]:
    """The memory that the ranks of ``group`` share, and a pidfd for every rank but this one.

    A collective over the group. Fails on all ranks if it fails on one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with contextlib.ExitStack() as stack:
        listener = None
        address = ""
        if rank == 0:
            address = f"\0pipekernels-{secrets.token_hex(16)}"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen(world_size)
        processes = _all_gather(_Process(_host_identity(), os.getpid(), address), group)
        _check_same_host(processes)

        segment, pidfds, problem = None, [], ""
        try:
            if listener is not None:
                fd = _hand_out(listener, processes, timeout)
            else:
                fd = _receive(processes[0], timeout)
            try:
                segment = _backend.load().Segment(fd, world_size)
            finally:
                os.close(fd)
            for process in processes:
                pidfds.append(os.pidfd_open(process.pid) if process.pid != os.getpid() else -1)
        except (OSError, RuntimeError, ImportError) as error:  # The peers must hear of it.
            problem = f"rank {rank}: {type(error).__name__}: {error}"
    problems = [text for text in _all_gather(problem, group) if text]
    if problems:
        del segment  # Not to be kept by the traceback.
        for fd in pidfds:
            if fd >= 0:
                os.close(fd)
        raise RuntimeError(f"the ranks cannot share memory: {'; '.join(problems)}")
    return segment, pidfds


def _all_gather(item: Any, group: dist.ProcessGroup | None) -> list[Any]:
    items = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group)
    return items


def _host_identity() -> tuple[str, ...]:
    """Equal for two processes if they can see each other's pids and abstract sockets."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    return (socket.gethostname(), boot_id, *namespaces)


def _check_same_host(processes: list[_Process]) -> None:
    for rank, process in enumerate(processes):
        if process.host != processes[0].host:
            raise RuntimeError(
                f"rank 0 and rank {rank} are not on one host ({processes[0].host[0]} and "
                f"{process.host[0]}, or two containers), but a Communicator needs shared memory; "
                "make one from a group of the ranks of each host"
            )
        if process.pid in [other.pid for other in processes[:rank]]:
            raise RuntimeError(
                f"rank {rank} shares process {process.pid} with another rank; "
                "use Communicator.threads() for ranks that are threads"
            )


def _hand_out(listener: socket.socket, processes: list[_Process], timeout: float) -> int:
    world_size = len(processes)
    fd = _backend.load().Segment.create(world_size, tuning.one_shot_bytes(world_size))
    try:
        waiting = {process.pid for process in processes[1:]}
        listener.settimeout(timeout)
        while waiting:
            connection, _ = listener.accept()
            with connection:
                pid = _peer_pid(connection)
                if pid in waiting:  # Anybody else goes away empty-handed.
                    socket.send_fds(connection, [b"\0"], [fd])
                    waiting.remove(pid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _receive(first: _Process, timeout: float) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(first.address)
        if _peer_pid(connection) != first.pid:
            raise RuntimeError("another process listens on the socket of rank 0")
        _, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise RuntimeError("rank 0 has hung up")
    return fds[0]


def _peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end, or ``None`` if it belongs to another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid if uid == os.geteuid() else None
