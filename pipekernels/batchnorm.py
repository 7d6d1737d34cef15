"""BatchNorm whose running statistics are updated once per mini-batch, not per microbatch."""

from pipekernels.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm"]
