"""Made-up hosts: the files in which Linux describes sockets, memory nodes and cores."""

from pathlib import Path

from pipekernels.numa.topology import Topology, format_cpus, read_topology


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


def topology_of(root: Path, shape: dict[str, int], **files: str) -> Topology:
    """That of a made-up host whose CPUs may all be used."""
    return read_topology(host(root, **shape, files=files), all_cpus(**shape))


TWO_SOCKETS = {"sockets": 2, "nodes": 1, "cores": 24, "smt": 2}
TWO_SOCKETS_NO_SMT = {"sockets": 2, "nodes": 1, "cores": 24, "smt": 1}
FOUR_NODES = {"sockets": 2, "nodes": 2, "cores": 16, "smt": 2}
EIGHT_NODES = {"sockets": 2, "nodes": 4, "cores": 8, "smt": 2}
