"""The cores and memory nodes that this process may use, and their division among ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Core:
    """A physical core. Cores sort by socket, node and hardware threads.

    Attributes:
        socket: its physical package.
        node: its memory node (NUMA node, or sub-NUMA cluster).
        cpus: its hardware threads that this process may use.
    """

    socket: int
    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """What this process may use of a host.

    Attributes:
        cores: in ascending order.
        quota: how many cores' time the control group grants; None without a limit.
    """

    cores: tuple[Core, ...]
    quota: float | None = None

    @property
    def nodes(self) -> list[int]:
        """The memory nodes of the cores."""
        return list(dict.fromkeys(core.node for core in self.cores))


def read_topology(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Topology:
    """Read sysfs and the control group below ``root``.

    Args:
        root: the folder that contains ``sys`` and ``proc``.
        allowed: CPU numbers that may be used; by default this process's affinity, which also
            reflects its cpuset.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    node_of: dict[int, int] = {}  # CPUs of hosts without NUMA are on node 0.
    for folder in sorted(root.glob("sys/devices/system/node/node[0-9]*")):
        for cpu in parse_cpus(_text(folder / "cpulist") or ""):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    cores = set()
    for cpu in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = parse_cpus(_text(folder / "thread_siblings_list") or str(cpu))
        socket = int(_text(folder / "physical_package_id") or 0)
        usable = tuple(sorted(set(siblings) & set(allowed)))
        # Each hardware thread of a core gives the same Core.
        cores.add(Core(max(socket, 0), node_of.get(cpu, 0), usable))  # -1: the platform knows none.
    return Topology(tuple(sorted(cores)), min(_quotas(root), default=None))


def parse_cpus(text: str) -> list[int]:
    """The numbers of a list such as ``0-3,8,10-11``."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def format_cpus(cpus: Collection[int]) -> str:
    """The inverse of :func:`parse_cpus`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def _quotas(root: Path) -> Iterator[float]:
    """The limits of this process's control group (version 2) and of those around it, in cores."""
    groups = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue  # Of version 1.
        group = groups / path.lstrip("/")
        for folder in (group, *group.parents):
            quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
            if quota != "max":
                yield int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        cpus: the hardware threads that it is bound to.
        cores: number of its cores.
        threads: its intra-op threads.
    """

    cpus: tuple[int, ...]
    cores: int
    threads: int


def places(topology: Topology, ranks: int) -> list[Place]:
    """Divide the cores among ``ranks``, in the order of sockets and nodes.

    A rank then has whole nodes, or a part of one, wherever the number of ranks allows that. All
    ranks have the same number of threads, since replicas with different numbers may have different
    bits: one per core, or fewer within a control group's quota.

    Raises:
        ValueError: ``ranks`` is below 1 or above the number of cores.
    """
    cores = topology.cores
    if not 1 <= ranks <= len(cores):
        raise ValueError(
            f"cannot bind {ranks} ranks to {len(cores)} cores, those that this process may use; "
            f"pass --nproc-per-node of 1 to {len(cores)}, or use torchrun, which binds none"
        )
    # More threads than the quota would be stopped for a part of each period, and peers wait.
    usable = len(cores) if topology.quota is None else min(topology.quota, len(cores))
    threads = max(1, math.floor(usable / ranks))
    found = []
    for rank in range(ranks):
        share = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        found.append(
            Place(
                cpus=tuple(sorted(cpu for core in share for cpu in core.cpus)),
                cores=len(share),
                threads=threads,
            )
        )
    return found


def table(topology: Topology, found: list[Place]) -> str:
    """One line for each rank."""
    sockets = {cpu: core.socket for core in topology.cores for cpu in core.cpus}
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    lines = []
    for rank, place in enumerate(found):
        socket = format_cpus({sockets[cpu] for cpu in place.cpus})
        node = format_cpus({node_of[cpu] for cpu in place.cpus})
        lines.append(
            f"rank {rank}: socket {socket}, node {node}, {place.cores} cores (CPUs "
            f"{format_cpus(place.cpus)}), {place.threads} threads"
        )
    if topology.quota is not None and topology.quota < len(topology.cores):
        lines.append(f"the control group grants the time of {topology.quota:g} cores")
    return "\n".join(lines)
