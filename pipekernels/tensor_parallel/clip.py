"""The norm of the gradients of a model with sharded layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.linear import sharded_parameters, whole


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of ``module``, in place, by their norm in the full model.

    As ``torch.nn.utils.clip_grad_norm_``, which on a rank knows the gradients of its own parts
    alone, so that ranks would scale what they all have by different factors. A collective: all
    ranks of all sharded layers call it.

    Args:
        module: the model; sharded layers may be at any depth, of several communicators.
        max_norm: the largest norm that is left as it is.
        norm_type: ``p`` of the p-norm; may be ``inf``.
        error_if_nonfinite: whether to raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        TypeError: ``module`` is no module; a sharded layer has got a parametrization, or a mask.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``; on every rank, and
            nothing is clipped then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be an nn.Module, got {type(module).__name__}; pass the model in place of "
            "its parameters: its layers know which of them are sharded"
        )
    sharded = sharded_parameters(module)
    grads: dict[Communicator | None, list[Tensor]] = {}
    for parameter in module.parameters():
        home, grad = sharded.get(parameter), parameter.grad
        comm = None if home is None else home[0].comm
        if grad is None and comm is not None:
            # Another rank may have one, and counts on this one's norm.
            grad = parameter.new_zeros(())
        if grad is not None:
            grads.setdefault(comm, []).append(grad)
    norms = []
    for comm, of_comm in grads.items():
        norm = whole(get_total_norm(of_comm, norm_type))
        if comm is not None:
            norm = torch.linalg.vector_norm(comm.all_gather(norm[None]), norm_type)
        norms.append(norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    clip_grads_with_norm_(module.parameters(), max_norm, total)
    return total
