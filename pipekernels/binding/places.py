"""Divides the cores of a host among its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipekernels.binding.topology import Topology, format_cpus


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
            f"{ranks} ranks cannot each have a core: this process may use "
            f"{len(cores)} cores; start 1 to {len(cores)} ranks, or use torchrun, which "
            "does not bind ranks"
        )
    usable = len(cores) if topology.quota is None else min(topology.quota, len(cores))
    threads = max(1, math.floor(usable / ranks))
    found = []
    for rank in range(ranks):
        own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        found.append(
            Place(
                cpus=tuple(sorted(cpu for core in own for cpu in core.cpus)),
                cores=len(own),
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
