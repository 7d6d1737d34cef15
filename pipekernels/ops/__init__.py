"""The public operations.

All are registered with ``torch.library``, work under ``torch.compile`` and are differentiable in
reverse mode; forward-mode differentiation, and differentiation by ``torch.func``, are errors.
Collectives assume that the loss is the sum of the losses of all ranks;
:mod:`pipekernels.tensor_parallel.functional` has the steps for ranks that compute the same loss.
"""

from pipekernels.ops.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from pipekernels.ops.device_copy import p2p_copy
from pipekernels.ops.gemm import sharded_gemm
from pipekernels.ops.micro_batch import concat_micro_batches, split_micro_batches

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "concat_micro_batches",
    "p2p_copy",
    "reduce_scatter",
    "sharded_gemm",
    "split_micro_batches",
]
