"""Pipeline parallelism: a model cut into stages that work on different micro-batches at the same
time."""

from pipekernels.pipeline.checkpoint import (
    is_checkpointing,
    is_recomputing,
)
from pipekernels.pipeline.device_map import (
    get_device,
    move_to_device,
    parallelize_module,
    parallelize_pipeline,
    unparallelize_module,
    unparallelize_pipeline,
)
from pipekernels.pipeline.pipe import (
    Pipe,
)
from pipekernels.pipeline.planner import (
    Plan,
    plan_pipeline,
)
from pipekernels.pipeline.spmd import (
    PipelineModule,
    execute_pipeline,
    execute_pipeline_step,
)
from pipekernels.pipeline.stages import (
    PipelineParallel,
    PipelineStage,
)
from pipekernels.pipeline.structure import (
    NoChunk,
)
from pipekernels.pipeline.timeline import (
    Timeline,
)

__all__ = [
    "NoChunk",
    "Pipe",
    "PipelineModule",
    "PipelineParallel",
    "PipelineStage",
    "Plan",
    "Timeline",
    "execute_pipeline",
    "execute_pipeline_step",
    "get_device",
    "is_checkpointing",
    "is_recomputing",
    "move_to_device",
    "parallelize_module",
    "parallelize_pipeline",
    "plan_pipeline",
    "unparallelize_module",
    "unparallelize_pipeline",
]
