"""Operations: each validates, allocates, picks a device and is registered with torch.library.

They work under ``torch.compile`` and are differentiable in reverse mode. Splitting and concatenating
micro-batches also have forward-mode derivatives and work under ``torch.func``; the others refuse to be
differentiated so. To collectives the loss is the sum of all ranks'
losses; :mod:`pipekernels.ops.tensor_parallel` has the steps for ranks that compute one and the same loss.
"""

from pipekernels.ops.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from pipekernels.ops.micro_batch import concat_micro_batches, split_micro_batches
from pipekernels.ops.p2p_copy import p2p_copy
from pipekernels.ops.sharded_gemm import sharded_gemm

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
