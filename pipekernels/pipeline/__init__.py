"""Pipeline parallelism: a model cut into stages that work on different microbatches at the same
time."""

from pipekernels.pipeline.context import is_checkpointing, is_recomputing
from pipekernels.pipeline.device_map import (
    get_device,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    unparallelize_module,
    unparallelize_pipeline,
)
from pipekernels.pipeline.nested import NoChunk, register_split
from pipekernels.pipeline.pipe import Pipe
from pipekernels.pipeline.pipeline_parallel import PipelineParallel, PipelineStage
from pipekernels.pipeline.spmd.execute import (
    PipelineModule,
    execute_pipeline,
    execute_pipeline_step,
)
from pipekernels.pipeline.timeline import Timeline

__all__ = [
    "NoChunk",
    "Pipe",
    "PipelineModule",
    "PipelineParallel",
    "PipelineStage",
    "Timeline",
    "execute_pipeline",
    "execute_pipeline_step",
    "get_device",
    "is_checkpointing",
    "is_recomputing",
    "move_to_device",
    "parallelize_module",
    "parallelize_pipeline",
    "register_split",
    "unparallelize_module",
    "unparallelize_pipeline",
]
