"""Pipeline parallelism: a model cut into stages that work on different micro-batches at the same
time."""

from pipekernels.pipeline.checkpoint import is_checkpointing, is_recomputing
from pipekernels.pipeline.pipe import Pipe
from pipekernels.pipeline.structure import NoChunk
from pipekernels.pipeline.timeline import Timeline

__all__ = ["NoChunk", "Pipe", "Timeline", "is_checkpointing", "is_recomputing"]
