"""Pipeline and tensor parallelism for PyTorch, on CPUs and CUDA GPUs, with its own kernels."""

from pipekernels import ops, skip
from pipekernels._version import __version__
from pipekernels.comm import CollectiveBarrier, Communicator, PeerError
from pipekernels.pipeline import NoChunk, Pipe, Timeline, is_checkpointing, is_recomputing
from pipekernels.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "CollectiveBarrier",
    "ColumnParallelLinear",
    "Communicator",
    "NoChunk",
    "PeerError",
    "Pipe",
    "RowParallelLinear",
    "Timeline",
    "__version__",
    "is_checkpointing",
    "is_recomputing",
    "ops",
    "skip",
]
