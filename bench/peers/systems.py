"""The systems whose all-reduce is compared, each as one rank calls it from Python.

Ranks of peers run in their own virtual environments, so this file imports only NumPy until a
system is made. Elements of bfloat16, which NumPy does not have, are stored as their bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

STORAGE = {"float32": np.float32, "bfloat16": np.uint16}


def elements(size: int, dtype: str) -> int:
    """How many elements there are in ``size`` bytes."""
    return size // np.dtype(STORAGE[dtype]).itemsize


class Candidate(NamedTuple):
    """A call to be timed, and the buffer that it works on."""

    buffer: np.ndarray
    call: Callable[[], object]
    reduces: bool = True  # Whether the call leaves the sum over all ranks in the buffer.


class System(Protocol):
    """One rank of a system.

    Attributes:
        rank: this rank.
        version: the system's version.
    """

    rank: int
    version: str

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        """All-reduces of ``count`` elements, by name; none if the system lacks ``dtype``."""

    def close(self) -> None:
        """Leave, as all ranks do."""


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


def _join_gloo(rank: int, ranks: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )


class Pipekernels:
    """Ours: ordinary and symmetric tensors, by ``auto`` and by each algorithm."""

    ALGORITHMS = ("one_shot", "two_shot", "ring")

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        import torch
        from torch.distributed import FileStore

        import pipekernels
        from pipekernels.comm import all_reduce_limits

        torch.set_num_threads(1)
        store = FileStore(str(folder / "store"), ranks)
        self._communicator = pipekernels.Communicator.from_store(store, rank, ranks)
        self.rank = rank
        tuned = "tuned" if all_reduce_limits.load() else "not tuned"
        self.version = f"{pipekernels.__version__}, {tuned}"

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        import torch

        ordinary = empty(count, dtype)
        symmetric = self._communicator.empty(count, dtype=getattr(torch, dtype))
        bits = symmetric.view(torch.int16) if dtype == "bfloat16" else symmetric
        kinds = {
            "ordinary": (as_tensor(ordinary), ordinary),
            "symmetric": (symmetric, bits.numpy().view(STORAGE[dtype])),
        }
        all_reduce = self._communicator.all_reduce
        found = {}
        for kind, (tensor, buffer) in kinds.items():
            found[kind] = Candidate(buffer, lambda tensor=tensor: all_reduce(tensor))
            for algorithm in self.ALGORITHMS:
                found[f"{kind} {algorithm}"] = Candidate(
                    buffer,
                    lambda tensor=tensor, algorithm=algorithm: all_reduce(
                        tensor, algorithm=algorithm
                    ),
                )
        return found

    def close(self) -> None:
        self._communicator.close()


class Gloo:
    """``torch.distributed``: TCP over loopback."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        import torch

        _join_gloo(rank, ranks, folder)
        self.rank = rank
        self.version = f"of torch {torch.__version__}"

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        import torch.distributed as dist

        buffer = empty(count, dtype)
        tensor = as_tensor(buffer)
        return {"Gloo": Candidate(buffer, lambda: dist.all_reduce(tensor))}

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class DeepSpeed:
    """DeepSpeed's shared-memory all-reduce for inference."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        # DeepSpeed shares memory if all ranks are local. The master's address and port are used
        # only in the name of the memory, so any strings do.
        port = folder.parent.name
        os.environ |= {
            "LOCAL_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "bench",
            "MASTER_PORT": port,
            "DS_ACCELERATOR": "cpu",
        }
        import deepspeed
        import torch
        from deepspeed import comm

        _join_gloo(rank, ranks, folder)
        comm.init_distributed("gloo")
        if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
            raise RuntimeError("DeepSpeed was installed without its shared-memory all-reduce")
        comm.inference_all_reduce(torch.ones(1))
        # All ranks have mapped the memory now, and DeepSpeed does not unlink it.
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_bench_{port}_{rank}").unlink()
        self.rank = rank
        self.version = deepspeed.__version__

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        from deepspeed import comm

        buffer = empty(count, dtype)
        tensor = as_tensor(buffer)
        return {"DeepSpeed": Candidate(buffer, lambda: comm.inference_all_reduce(tensor))}

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


_MPI_NAMES = {"MPICH": "MPICH", "Open MPI": "Open MPI", "Intel(R) MPI": "Intel MPI"}
# MPIX_BFLOAT16 of their mpi.h, as mpi4py has no name for it. Open MPI has no such type.
_MPI_BFLOAT16 = {"MPICH": 0x4C00024C, "Intel MPI": 0x4C000247}


class Mpi:
    """An MPI library through mpi4py; which one depends on the virtual environment."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        from mpi4py import MPI

        library = MPI.Get_library_version()
        self._name = next(name for start, name in _MPI_NAMES.items() if library.startswith(start))
        self.rank = MPI.COMM_WORLD.rank
        self.version = re.search(r"\d+(\.\d+)+", library).group()

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        from mpi4py import MPI

        if dtype == "float32":
            datatype = MPI.FLOAT
        elif self._name in _MPI_BFLOAT16:
            datatype = MPI.Datatype.fromhandle(_MPI_BFLOAT16[self._name])
        else:
            return {}
        buffer = empty(count, dtype)
        message = [buffer, datatype]  # Faster than letting mpi4py derive the type of the array.
        all_reduce, in_place = MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE
        return {self._name: Candidate(buffer, lambda: all_reduce(in_place, message))}

    def close(self) -> None:
        """MPI is finalised at exit."""


class Streaming:
    """The bound for a symmetric tensor: every rank reads and writes as many bytes as it has, to
    other memory (a copy) or in place."""

    version = np.__version__

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank = rank

    def candidates(self, count: int, dtype: str) -> dict[str, Candidate]:
        buffer, other = empty(count, dtype), empty(count, dtype)
        words = buffer.view(np.int64)
        return {
            "copy": Candidate(buffer, lambda: np.copyto(other, buffer), reduces=False),
            "in place": Candidate(buffer, lambda: np.invert(words, out=words), reduces=False),
        }

    def close(self) -> None:
        """Nothing to leave."""


SYSTEMS: dict[str, Callable[[int, int, Path], System]] = {
    "pipekernels": Pipekernels,
    "Gloo": Gloo,
    "DeepSpeed": DeepSpeed,
    "MPICH": Mpi,
    "Open MPI": Mpi,
    "Intel MPI": Mpi,
    "streaming": Streaming,
}
