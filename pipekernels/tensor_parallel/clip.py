"""Gradient clipping for models with sharded layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.data_parallel import as_full_tensor
from pipekernels.tensor_parallel.invariant.arithmetic import ShardGradient, slab_norms
from pipekernels.tensor_parallel.sharded import sharded_parameters


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of ``module``, in place, by the norm of the full model's gradients.

    A collective: all ranks of all sharded layers must call it, in place of
    ``torch.nn.utils.clip_grad_norm_``, which sees only one rank's shards.

    Args:
        module: the model; sharded layers may use several communicators.
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
    groups: dict[tuple[bool, Communicator | None], list[ShardGradient]] = {}
    for parameter in module.parameters():
        if parameter in sharded:  # Also without a gradient: every rank must join the all-gather.
            layer, name = sharded[parameter]
            blocks = [size for _, size in layer.spans(name)]
            counts = layer.shards.index(layer.shards[layer.rank]) == layer.rank
            shard = ShardGradient(parameter, layer.shard_dim(name), blocks, counts)
            groups.setdefault((layer.invariant, layer.comm), []).append(shard)
        elif parameter.grad is not None:
            groups.setdefault((False, None), []).append(ShardGradient(parameter))
    norms = []
    for (invariant, comm), shards in groups.items():
        if invariant and comm is not None:
            parts = slab_norms(shards, norm_type, comm)
        else:
            grads = [(shard.parameter, shard.parameter.grad, shard.counts) for shard in shards]
            own = [p.new_zeros(()) if g is None or not counts else g for p, g, counts in grads]
            parts = as_full_tensor(get_total_norm(own, norm_type))[None]
        if comm is not None:
            parts = torch.linalg.vector_norm(comm.all_gather(parts), norm_type)
        norms.append(parts.view(()))
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(module.parameters(), max_norm, total)
    return total
