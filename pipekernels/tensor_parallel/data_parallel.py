"""Data parallelism around sharded layers: FSDP2's parameters, and a check that
DistributedDataParallel does not average over ranks that hold different shards."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipekernels._torch_private import active_ddp
from pipekernels.comm import Communicator

_checked: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()


def check_data_parallel(comm: Communicator) -> None:
    """Raise if the DistributedDataParallel that runs, if any, averages over ranks of ``comm``.

    A collective at the first call in a DistributedDataParallel.

    Raises:
        RuntimeError: it does, and has overwritten the shards of all ranks with those of one.
    """
    ddp = None if torch.compiler.is_compiling() else active_ddp()
    if ddp is None or comm.world_size == 1:
        return
    known = _checked.setdefault(ddp, set())
    if comm.handle in known:
        return
    # The ranks of ``comm``, as torch.distributed numbers them.
    peers = comm.all_gather(torch.tensor([dist.get_rank()], device="cpu")).tolist()
    shared = sorted(set(peers) & set(dist.get_process_group_ranks(ddp.process_group)))
    if len(shared) > 1:
        raise RuntimeError(
            f"DistributedDataParallel averages over the ranks {shared}, which hold different "
            f"shards, and has overwritten these with the shards of rank {shared[0]}; load the "
            "model again and pass process_group=, the group of the ranks that hold the same shards "
            "(mesh['data'].get_group() of a DeviceMesh), or do without DistributedDataParallel if "
            "there is only one copy of the model: all ranks have the full gradients of replicated "
            "parameters (TrainerMixin for transformers' Trainer, adapt_accelerator for accelerate)"
        )
    known.add(comm.handle)


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
