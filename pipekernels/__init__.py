"""Pipeline and tensor parallelism for PyTorch, on CPUs and CUDA GPUs, with its own kernels."""

from pipekernels import balance, batchnorm, ops, skip
from pipekernels._version import __version__
from pipekernels.comm import CollectiveBarrier, Communicator, PeerError
from pipekernels.huggingface import load_pretrained  # Which registers its plan providers.
from pipekernels.pipeline import (
    NoChunk,
    Pipe,
    PipelineModule,
    PipelineParallel,
    PipelineStage,
    Timeline,
    execute_pipeline,
    execute_pipeline_step,
    get_device,
    is_checkpointing,
    is_recomputing,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    register_split,
    unparallelize_module,
    unparallelize_pipeline,
)
from pipekernels.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    full_state_dict,
    plan_for,
    tensor_parallelize,
)

__all__ = [
    "CollectiveBarrier",
    "ColumnParallelLinear",
    "Communicator",
    "NoChunk",
    "PeerError",
    "Pipe",
    "PipelineModule",
    "PipelineParallel",
    "PipelineStage",
    "RowParallelLinear",
    "Timeline",
    "__version__",
    "balance",
    "batchnorm",
    "execute_pipeline",
    "execute_pipeline_step",
    "full_state_dict",
    "get_device",
    "is_checkpointing",
    "is_recomputing",
    "load_pretrained",
    "move_to_device",
    "ops",
    "parallelize_module",
    "parallelize_pipeline",
    "plan_for",
    "register_split",
    "skip",
    "tensor_parallelize",
    "unparallelize_module",
    "unparallelize_pipeline",
]


def __dir__() -> list[str]:
    return __all__
