"""The differentiable steps of tensor parallelism."""

from pipekernels.tensor_parallel.functional import (
    copy_to_holders,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    row_linear,
    scatter_to_ranks,
    shard_sizes,
)

__all__ = [
    "copy_to_holders",
    "copy_to_ranks",
    "gather_from_ranks",
    "reduce_from_ranks",
    "row_linear",
    "scatter_to_ranks",
    "shard_sizes",
]
