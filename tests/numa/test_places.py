"""Where ranks run, on made-up hosts: sockets, memory nodes, hardware threads, limits."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from pipekernels.numa.topology import (
    Place,
    Topology,
    format_cpus,
    parse_cpus,
    places,
    read_topology,
    table,
)

TWO_SOCKETS = {"sockets": 2, "nodes": 1, "cores": 24, "smt": 2}
TWO_SOCKETS_NO_SMT = {"sockets": 2, "nodes": 1, "cores": 24, "smt": 1}
FOUR_NODES = {"sockets": 2, "nodes": 2, "cores": 16, "smt": 2}
EIGHT_NODES = {"sockets": 2, "nodes": 4, "cores": 8, "smt": 2}
Found = list[tuple[str, tuple[int, ...], int, int]]  # CPUs, nodes, cores, threads of each rank.


def host(
    root: Path,
    *,
    sockets: int,
    nodes: int,
    cores: int,
    smt: int,
    files: dict[str, str] | None = None,
) -> Path:
    """Files of a server. Linux numbers the first hardware thread of each core, then the second.

    Args:
        root: where they are written to.
        sockets: number of packages.
        nodes: memory nodes per socket.
        cores: physical cores per node.
        smt: hardware threads per core.
        files: more of them, such as those of control groups.
    """
    total = sockets * nodes * cores
    texts = dict(files or {})
    for core in range(total):
        threads = [core + thread * total for thread in range(smt)]
        for cpu in threads:
            folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
            texts[f"{folder}/thread_siblings_list"] = ",".join(map(str, threads))
            texts[f"{folder}/physical_package_id"] = str(core // (nodes * cores))
    for node in range(sockets * nodes):
        first = [core + thread * total for thread in range(smt) for core in
                 range(node * cores, (node + 1) * cores)]  # fmt: skip
        texts[f"sys/devices/system/node/node{node}/cpulist"] = format_cpus(first)
    # Memory without cores, as on hosts with CXL.
    texts[f"sys/devices/system/node/node{sockets * nodes}/cpulist"] = ""
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def all_cpus(*, sockets: int, nodes: int, cores: int, smt: int) -> range:
    return range(sockets * nodes * cores * smt)


def topology_of(root: Path, shape: dict[str, Any], **files: str) -> Topology:
    """That of a made-up host whose CPUs may all be used."""
    return read_topology(host(root, **shape, files=files), all_cpus(**shape))


def found(
    root: Path, shape: dict[str, Any], ranks: int, allowed: Collection[int] | None = None
) -> Found:
    topology = read_topology(host(root, **shape), allowed or all_cpus(**shape))
    return [
        (format_cpus(place.cpus), nodes_of(topology, place), place.cores, place.threads)
        for place in places(topology, ranks)
    ]


def nodes_of(topology: Topology, place: Place) -> tuple[int, ...]:
    own = [core.node for core in topology.cores if set(core.cpus) <= set(place.cpus)]
    return tuple(dict.fromkeys(own))


PLACES: dict[str, tuple[dict[str, int], Found]] = {
    "a rank per socket, with both hardware threads of its cores": (
        TWO_SOCKETS,
        [("0-23,48-71", (0,), 24, 24), ("24-47,72-95", (1,), 24, 24)],
    ),
    "without SMT, where a core is a CPU": (
        TWO_SOCKETS_NO_SMT,
        [("0-23", (0,), 24, 24), ("24-47", (1,), 24, 24)],
    ),
    "fewer ranks than nodes, which have whole nodes of one socket": (
        FOUR_NODES,
        [("0-31,64-95", (0, 1), 32, 32), ("32-63,96-127", (2, 3), 32, 32)],
    ),
    "three ranks on two sockets, which have as many threads each": (
        TWO_SOCKETS_NO_SMT | {"cores": 16},
        [("0-9", (0,), 10, 10), ("10-20", (0, 1), 11, 10), ("21-31", (1,), 11, 10)],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str, tmp_path: Path) -> None:
    shape, expected = PLACES[name]
    assert found(tmp_path, shape, len(expected)) == expected


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_no_rank_spans_nodes_where_their_number_allows_it(ranks: int, tmp_path: Path) -> None:
    own = found(tmp_path, EIGHT_NODES, ranks)
    assert [nodes for _, nodes, *_ in own] == [(8 * rank // ranks,) for rank in range(ranks)]
    assert {(cores, threads) for *_, cores, threads in own} == {(64 // ranks, 64 // ranks)}
    cpus = [cpu for cpus, *_ in own for cpu in parse_cpus(cpus)]
    assert sorted(cpus) == list(range(128))


def test_a_limited_affinity_is_divided(tmp_path: Path) -> None:
    """Such as a container's cpuset: here one hardware thread of some cores."""
    own = found(tmp_path, TWO_SOCKETS, 2, allowed=[2, 3, 4, 30, 31, 32])
    assert own == [("2-4", (0,), 3, 3), ("30-32", (1,), 3, 3)]


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/cpu.max": "600000 100000",
         "sys/fs/cgroup/pod/box/cpu.max": "max 100000"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 50000"},
    ],
    ids=["below", "root of a namespace"],
)  # fmt: skip
def test_a_container_of_six_cores_has_so_many_threads(
    files: dict[str, str], tmp_path: Path
) -> None:
    topology = topology_of(tmp_path, TWO_SOCKETS, **files)
    assert topology.quota == 6.0
    assert [place.threads for place in places(topology, 2)] == [3, 3]
    assert table(topology, places(topology, 2)).splitlines() == [
        "rank 0: socket 0, node 0, 24 cores (CPUs 0-23,48-71), 3 threads",
        "rank 1: socket 1, node 1, 24 cores (CPUs 24-47,72-95), 3 threads",
        "the control group grants the time of 6 cores",
    ]


def test_a_host_without_sysfs_has_a_core_per_cpu(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, allowed=[4, 5])
    assert topology.nodes == [0] and topology.quota is None
    assert [place.cpus for place in places(topology, 2)] == [(4,), (5,)]
