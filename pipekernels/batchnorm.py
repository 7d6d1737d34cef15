"""BatchNorm under micro-batches; see :mod:`pipekernels.pipeline.batchnorm`."""

from pipekernels.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm"]
