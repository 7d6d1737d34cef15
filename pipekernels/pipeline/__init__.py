"""Pipeline parallelism: a model cut into stages that work on different microbatches at the same
time."""

from pipekernels.pipeline.pipe import Pipe
from pipekernels.pipeline.placement.device_map import (
    get_device,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    unparallelize_module,
    unparallelize_pipeline,
)
from pipekernels.pipeline.schedule.timeline import Timeline
from pipekernels.pipeline.spmd.execute import (
    PipelineModule,
    execute_pipeline,
    execute_pipeline_step,
)
from pipekernels.pipeline.stage.context import is_checkpointing, is_recomputing
from pipekernels.pipeline.stages import PipelineParallel, PipelineStage
from pipekernels.pipeline.values.structure import NoChunk, register_split

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
