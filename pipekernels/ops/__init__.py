"""Operations: each validates, allocates, picks a device and is registered with torch.library."""

from pipekernels.ops.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from pipekernels.ops.micro_batch import concat_micro_batches, split_micro_batches

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "concat_micro_batches",
    "reduce_scatter",
    "split_micro_batches",
]
