"""Processes, as those of other ranks know them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from pipekernels.comm import messages


def host_identity() -> tuple[str, ...]:
    """Equal for two processes of one user that can see each other's pids and abstract sockets, and
    have the same environment variable ``PIPEKERNELS_HOST_ID``."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    override = os.environ.get("PIPEKERNELS_HOST_ID", "")
    return (socket.gethostname(), boot_id, *namespaces, str(os.geteuid()), override)


class Process(NamedTuple):
    """What tells a process from all others."""

    host: tuple[str, ...]
    pid: int
    begun: int | None


def own_process() -> Process:
    return Process(host_identity(), os.getpid(), start_time(os.getpid()))


def has_died(process: bytes) -> bool:
    """Whether a message of :func:`own_process` is of a process of this host that has ended. False
    for those of other hosts, which cannot be seen."""
    host, pid, begun = messages.decode(process, "a rank", Process)
    return host == host_identity() and start_time(pid) != begun


def start_time(pid: int) -> int | None:
    """In clock ticks since the host was booted; None if there is no such process, or if it has
    ended and waits for its parent."""
    try:
        # The name in parentheses may have spaces; the fields after it are the 3rd and further ones.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
