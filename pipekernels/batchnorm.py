"""BatchNorm under micro-batches; see :mod:`pipekernels.pipeline.stage.batchnorm`."""

from pipekernels.pipeline.stage.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm"]
