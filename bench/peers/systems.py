"""The systems whose all-reduce is compared, each as one rank calls it from Python.

Ranks of peers run in their own virtual environments, so this file imports only NumPy until a
system is made. Elements of bfloat16, which NumPy does not have, are stored as their bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STORAGE = {"float32": np.float32, "bfloat16": np.uint16}
ALGORITHMS = ("one_shot", "two_shot", "ring")  # Of ours.


class Candidate(NamedTuple):
    """A call to be timed, and the buffer that it works on."""

    buffer: np.ndarray
    call: Callable[[], object]
    reduces: bool = True  # Whether the call leaves the sum over all ranks in the buffer.


class System(NamedTuple):
    """One rank of a system.

    Attributes:
        rank: this rank.
        version: the system's version.
        candidates: all-reduces of so many elements of a dtype, by name; none if it lacks the dtype.
        close: called on all ranks in the end.
    """

    rank: int
    version: str
    candidates: Callable[[int, str], dict[str, Candidate]]
    close: Callable[[], object] = lambda: None


def elements(size: int, dtype: str) -> int:
    """How many elements there are in ``size`` bytes."""
    return size // np.dtype(STORAGE[dtype]).itemsize


def empty(count: int, dtype: str) -> np.ndarray:
    """Memory for all systems, except symmetric tensors: aligned to a cache line, as torch's is."""
    line = 64
    memory = np.empty(count + line, STORAGE[dtype])
    begin = -memory.ctypes.data % line // memory.itemsize
    return memory[begin : begin + count]


def as_tensor(buffer: np.ndarray) -> Any:
    """The torch tensor on ``buffer``."""
    import torch

    if buffer.dtype == np.uint16:
        return torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(buffer)


def pipekernels(rank: int, ranks: int, folder: Path) -> System:
    """Ours: ordinary and symmetric tensors, by ``auto`` and by each algorithm."""
    import torch

    import pipekernels

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    communicator = pipekernels.Communicator.from_store(store, rank, ranks)

    def candidates(count: int, dtype: str) -> dict[str, Candidate]:
        ordinary, found = empty(count, dtype), {}
        symmetric = communicator.empty(count, dtype=getattr(torch, dtype))
        bits = symmetric.view(torch.int16) if dtype == "bfloat16" else symmetric
        for kind, tensor, buffer in (
            ("ordinary", as_tensor(ordinary), ordinary),
            ("symmetric", symmetric, bits.numpy().view(STORAGE[dtype])),
        ):
            for algorithm in ("auto", *ALGORITHMS):
                name = kind if algorithm == "auto" else f"{kind} {algorithm}"
                options = {} if algorithm == "auto" else {"algorithm": algorithm}
                found[name] = Candidate(buffer, partial(communicator.all_reduce, tensor, **options))
        return found

    return System(rank, pipekernels.__version__, candidates, communicator.close)


def gloo(rank: int, ranks: int, folder: Path) -> System:
    """``torch.distributed``: TCP over loopback."""
    import torch
    import torch.distributed as dist

    return on_torch("Gloo", rank, ranks, folder, f"of torch {torch.__version__}", dist.all_reduce)


def on_torch(
    name: str, rank: int, ranks: int, folder: Path, version: str, all_reduce: Callable[[Any], Any]
) -> System:
    """A system that needs a default group of Gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)

    def candidates(count: int, dtype: str) -> dict[str, Candidate]:
        buffer = empty(count, dtype)
        tensor = as_tensor(buffer)
        return {name: Candidate(buffer, partial(all_reduce, tensor))}

    return System(rank, version, candidates, dist.destroy_process_group)


def deepspeed(rank: int, ranks: int, folder: Path) -> System:
    """DeepSpeed's shared-memory all-reduce for inference."""
    # DeepSpeed shares memory if all ranks are local. The master's address and port are used only in
    # the name of the memory, so any strings do.
    port = folder.parent.name
    os.environ |= {"LOCAL_SIZE": str(ranks), "LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "bench", "MASTER_PORT": port}
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    from deepspeed import comm

    all_reduce = comm.inference_all_reduce
    system = on_torch("DeepSpeed", rank, ranks, folder, deepspeed.__version__, all_reduce)
    comm.init_distributed("gloo")
    if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
        raise RuntimeError("DeepSpeed was installed without its shared-memory all-reduce")
    all_reduce(torch.ones(1))
    # All ranks have mapped the memory now, and DeepSpeed does not unlink it.
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_bench_{port}_{rank}").unlink()
    return system


MPI_NAMES = {"MPICH": "MPICH", "Open MPI": "Open MPI", "Intel(R) MPI": "Intel MPI"}
# MPIX_BFLOAT16 of their mpi.h, as mpi4py has no name for it. Open MPI has no such type.
MPI_BFLOAT16 = {"MPICH": 0x4C00024C, "Intel MPI": 0x4C000247}


def mpi(rank: int, ranks: int, folder: Path) -> System:
    """An MPI library through mpi4py; which one depends on the virtual environment."""
    from mpi4py import MPI

    library = MPI.Get_library_version()
    name = next(name for start, name in MPI_NAMES.items() if library.startswith(start))
    all_reduce, in_place = MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE

    def candidates(count: int, dtype: str) -> dict[str, Candidate]:
        datatype = MPI.FLOAT
        if dtype == "bfloat16":
            if name not in MPI_BFLOAT16:
                return {}
            datatype = MPI.Datatype.fromhandle(MPI_BFLOAT16[name])
        buffer = empty(count, dtype)
        message = [buffer, datatype]  # Faster than letting mpi4py derive the type of the array.
        return {name: Candidate(buffer, partial(all_reduce, in_place, message))}

    version = re.search(r"\d+(\.\d+)+", library)
    return System(MPI.COMM_WORLD.rank, version.group() if version else "?", candidates)


def streaming(rank: int, ranks: int, folder: Path) -> System:
    """The bound for a symmetric tensor: every rank reads and writes as many bytes as it has, to
    other memory (a copy) or in place."""

    def candidates(count: int, dtype: str) -> dict[str, Candidate]:
        buffer, other = empty(count, dtype), empty(count, dtype)
        words = buffer.view(np.int64)
        return {
            "copy": Candidate(buffer, partial(np.copyto, other, buffer), reduces=False),
            "in place": Candidate(buffer, partial(np.invert, words, out=words), reduces=False),
        }

    return System(rank, np.__version__, candidates)


SYSTEMS: dict[str, Callable[[int, int, Path], System]] = {
    "pipekernels": pipekernels,
    "Gloo": gloo,
    "DeepSpeed": deepspeed,
    "MPICH": mpi,
    "Open MPI": mpi,
    "Intel MPI": mpi,
    "streaming": streaming,
}
