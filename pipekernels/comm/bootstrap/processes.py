"""How processes of one host share memory.

The first rank creates a memory file without a name. Its peers open it by the first rank's
descriptor in /proc, which the kernel allows to processes of the same user. Nothing remains when the
processes end. All else is exchanged over the rendezvous. Ranks on several hosts share no memory:
they learn only that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from pipekernels import _backend
from pipekernels.comm.bootstrap.rendezvous import Rendezvous, host_identity, of_color


@dataclass(frozen=True)
class _Process:
    host: tuple[str, ...]
    pid: int
    name: str  # Unique.
    color: int | None = 0
    key: int = 0


class JoinedRank(NamedTuple):
    """One rank of a new communicator, which owns ``pidfds``."""

    rank: int
    world_size: int
    hosts: int  # That the ranks are on. If there are several, no memory is shared.
    name: str  # The same on all ranks, and unique.
    segment: Any  # The memory that the ranks share, or None.
    pidfds: list[int]  # For every rank, -1 for this one.


def join_processes(
    rendezvous: Rendezvous, color: int | None = 0, key: int = 0
) -> JoinedRank | None:
    """Join the ranks of ``rendezvous`` that give the same ``color``, ordered by ``key``, then rank.

    A collective over the rendezvous, whose waits are bounded by the rendezvous alone. Returns
    ``None`` for a rank without a colour. If it fails on one rank it fails on all ranks of the
    colour; if the first exchange fails, on all ranks.
    """
    # 1. Every rank introduces itself.
    introduction: _Process | str
    try:
        name = f"pipekernels-{secrets.token_hex(16)}"
        introduction = _Process(host_identity(), os.getpid(), name, color, key)
    except OSError as error:
        introduction = problem_of(rendezvous.rank, error)
    either = cast("type[_Process | str]", _Process | str)
    everyone = rendezvous.all_gather(introduction, either)
    raise_join_failure(other for other in everyone if isinstance(other, str))
    if color is None:
        rendezvous.all_gather(-1, int)
        rendezvous.all_gather("", str)
        return None
    introduced = [other for other in everyone if isinstance(other, _Process)]
    ranks = of_color([(other.color, other.key) for other in introduced], color)
    processes = [introduced[rank] for rank in ranks]
    rank, hosts = ranks.index(rendezvous.rank), _count_hosts(processes)
    with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
        # 2. The first rank creates the memory, and keeps its descriptor until all have opened it.
        module, problem, created = _backend.load(), "", -1
        try:
            if hosts == 1 and rank == 0:
                created = module.Segment.create(len(ranks))
                always.callback(os.close, created)
        except Exception as error:  # noqa: BLE001 (Sent to the peers.)
            problem = problem_of(rank, error)
        fd = rendezvous.all_gather(created, int)[ranks[0]]
        # 3. All map the memory.
        segment, pidfds = None, []
        try:
            if fd >= 0:
                mine = _open(processes[0], fd)
                always.callback(os.close, mine)  # The mapping holds the memory.
                segment = module.Segment(mine, len(ranks))
                # By a pidfd the extension sees the end of a process at once, without reused pids.
                for peer, process in enumerate(processes):
                    pidfds.append(-1 if peer == rank else module.open_pidfd(process.pid))
                    if pidfds[-1] >= 0:
                        undo.callback(os.close, pidfds[-1])
        except Exception as error:  # noqa: BLE001 (Sent to the peers.)
            problem = problem_of(rank, error)
        # 4. All learn whether all have succeeded; else what was opened is closed.
        answers = rendezvous.all_gather(problem, str)
        problems = [answers[member] for member in ranks]
        if any(problems):
            segment = None  # Else the traceback would keep it alive.
        raise_join_failure(problems)
        undo.pop_all()
    return JoinedRank(rank, len(ranks), hosts, processes[0].name, segment, pidfds)


def problem_of(rank: int, error: Exception) -> str:
    """The message for the other ranks about an error that keeps ``rank`` from joining."""
    return f"rank {rank}: {type(error).__name__}: {error}"


def raise_join_failure(problems: Iterable[str]) -> None:
    """Raise RuntimeError if any rank has a problem."""
    text = "; ".join(filter(None, problems))
    if text:
        raise RuntimeError(f"the ranks cannot be joined: {text}")


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


def _open(process: _Process, fd: int) -> int:
    """A new descriptor of the file that ``process`` has as ``fd``."""
    folder = Path(f"/proc/{process.pid}")
    if folder.stat().st_uid != os.geteuid():  # Root may open the files of all users.
        raise PermissionError(f"process {process.pid} belongs to another user")
    try:
        return os.open(folder / "fd" / str(fd), os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise PermissionError(
            f"{error}; Linux protects that process from its own user, as it has changed its user "
            "or has capabilities of a file; call prctl(PR_SET_DUMPABLE, 1) there"
        ) from None
