"""Data parallelism around sharded layers: FSDP2's parameters, and a check that
DistributedDataParallel does not average over ranks that hold different shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import active_ddp
from pipekernels.comm import Communicator


def check_data_parallel(comm: Communicator) -> None:
    """Raise RuntimeError if the DistributedDataParallel that runs averages over all ranks of the
    job, and so over the ranks of ``comm``: it has overwritten their shards with one rank's."""
    ddp = None if torch.compiler.is_compiling() else active_ddp()
    if ddp is None or comm.world_size == 1:
        return
    if dist.get_world_size(ddp.process_group) == dist.get_world_size():
        raise RuntimeError(
            f"DistributedDataParallel averages over all ranks, of which {comm.world_size} hold "
            "different shards, and has overwritten these with the shards of one rank; load the "
            "model again and pass process_group=, the group of the ranks that hold the same shards "
            "(mesh['data'].get_group() of a DeviceMesh), or do without DistributedDataParallel if "
            "there is only one copy of the model: all ranks have the full gradients of replicated "
            "parameters (TrainerMixin for transformers' Trainer, adapt_accelerator for accelerate)"
        )


def as_full_tensor(value: Tensor) -> Tensor:
    """``value``, gathered if it is a ``DTensor``, as FSDP2's parameters are."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def distributed_like(parameter: Any, value: Tensor) -> Tensor:
    """``value`` as a ``DTensor`` if ``parameter`` is one: the inverse of :func:`as_full_tensor`."""
    if not hasattr(parameter, "full_tensor"):
        return value
    # Costs nothing here: a DTensor exists, so the module has been imported.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
