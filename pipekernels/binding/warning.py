"""A warning of ranks that share cores or float over memory nodes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from pipekernels.binding.topology import Topology, read_topology

_REMEDY = "start them by `pipekernels run`, or bind them by numactl or taskset"

_was_checked = False


def check_places_once(pids: Sequence[int]) -> None:
    """Warn, at the first call of this process alone, of what is wrong with where the processes
    ``pids``, the ranks of this host, may run."""
    global _was_checked
    if _was_checked:
        return
    _was_checked = True
    try:
        affinities = [os.sched_getaffinity(pid) for pid in pids]
    except OSError:
        return  # One has ended: the join will say so.
    found = problem(affinities)
    if found is not None:
        warnings.warn(found, RuntimeWarning, stacklevel=2)


def problem(affinities: Sequence[Collection[int]], root: Path = Path("/")) -> str | None:
    """What is wrong with ranks of one host that may run on the CPUs ``affinities``; None if
    nothing: each has its own cores, on one memory node or on its own nodes.

    Args:
        affinities: CPU numbers for each rank.
        root: where ``sys`` and ``proc`` lie.
    """
    allowed = frozenset[int]().union(*affinities)
    topology = read_topology(root, allowed)
    core_of = {cpu: index for index, core in enumerate(topology.cores) for cpu in core.cpus}
    cores = [frozenset(core_of[cpu] for cpu in cpus) for cpus in affinities]
    for mine in dict.fromkeys(cores):
        confined = [rank for rank, own in enumerate(cores) if own <= mine]
        if len(confined) > len(mine):
            return (
                f"ranks {', '.join(map(str, confined))} of this host share {len(mine)} core(s) "
                "and wait for each other's time slices; start at most "
                f"{len(topology.cores)} ranks; {_REMEDY}"
            )
    return _floating(topology, cores)


def _floating(topology: Topology, cores: Sequence[frozenset[int]]) -> str | None:
    """Ranks that may run on several memory nodes, of which others use one too."""
    nodes = [{topology.cores[core].node for core in own} for own in cores]
    for rank, own in enumerate(nodes):
        peers = [peer for peer, theirs in enumerate(nodes) if peer != rank and own & theirs]
        if len(own) > 1 and peers:
            return (
                f"rank {rank} of this host may run on memory nodes {sorted(own)}, as may others: "
                "much of what it reads lies on another node than it runs on; " + _REMEDY
            )
    return None
