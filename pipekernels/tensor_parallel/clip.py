"""Gradient clipping for models with sharded layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.arithmetic.invariant import slab_norms
from pipekernels.tensor_parallel.dtensor import as_full_tensor
from pipekernels.tensor_parallel.sharded import sharded_parameters


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of ``module``, in place, by the norm of the full model's gradients.

    Use it in place of ``torch.nn.utils.clip_grad_norm_``, which sees only one rank's shards and
    would scale replicated gradients differently on each rank. A collective: all ranks of all
    sharded layers must call it.

    Args:
        module: the model; sharded layers may be at any depth and use several communicators.
        max_norm: gradients with a larger norm are scaled down to it.
        norm_type: ``p`` of the p-norm; may be ``inf``.
        error_if_nonfinite: whether to raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        TypeError: ``module`` is not a module, or a sharded layer has a parametrization or a mask.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set. All ranks raise,
            and no gradient is changed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be an nn.Module, got {type(module).__name__}; pass the model in place of "
            "its parameters: its layers know which of them are sharded"
        )
    sharded = sharded_parameters(module)
    grads: dict[Communicator | None, list[Tensor]] = {}
    slabs: dict[Communicator, list[Tensor]] = {}
    for parameter in module.parameters():
        shard_key, grad = sharded.get(parameter), parameter.grad
        if shard_key is None:
            if grad is not None:
                grads.setdefault(None, []).append(grad)
            continue
        layer, name = shard_key
        if layer.invariant:
            grad = torch.zeros_like(parameter) if grad is None else as_full_tensor(grad)
            blocks = [size for _, size in layer.spans(name)]
            norms_of = slab_norms(grad, layer.shard_dim(name), blocks, layer.comm, norm_type)
            slabs.setdefault(layer.comm, []).append(norms_of)
            continue
        # Every rank must join the all-gather below; of the ranks that hold one shard, the first
        # counts.
        if grad is None or layer.rank % layer.copies:
            grad = parameter.new_zeros(())
        grads.setdefault(layer.comm, []).append(grad)
    norms = []
    for comm, comm_grads in grads.items():
        norm = as_full_tensor(get_total_norm(comm_grads, norm_type))
        if comm is not None:
            norm = torch.linalg.vector_norm(comm.all_gather(norm[None]), norm_type)
        norms.append(norm)
    for comm, of_slabs in slabs.items():
        all_slabs = comm.all_gather(torch.stack(of_slabs, 1))  # [SLABS, parameters]
        norms.append(torch.linalg.vector_norm(all_slabs, norm_type))
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(module.parameters(), max_norm, total)
    return total
