"""Against NCCL, on 2 to 8 GPUs: collectives, the row-parallel layer, pipes over real devices."""

from bench.nccl.tables import CONDITIONS, plot, table

__all__ = ["CONDITIONS", "plot", "table"]
