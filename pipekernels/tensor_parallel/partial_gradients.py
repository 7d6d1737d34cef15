"""Replicated parameters between a column-parallel and a row-parallel layer.

There, a rank sees only its own features. So such a parameter (Qwen3's norms of queries and keys)
gets a different partial gradient on each rank, and the ranks' copies would drift apart without an
error. :func:`sum_gradients` sums these gradients over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.full_layer import note_hook
from pipekernels.tensor_parallel.functional import Heads, copy_to_ranks, shard_spans
from pipekernels.tensor_parallel.invariant.exact_sums import exact_gradients

# In the __dict__ of parameters, which a Pipe's parameter copies share.
_SUMMED = "_pipekernels_gradient_is_summed"


def sum_gradients(module: nn.Module, comm: Communicator, invariant: bool) -> None:
    """Sum the gradients of the parameters of ``module`` over the ranks, in every backward."""
    exact_sum = exact_gradients(comm) if invariant else None

    # Functions: deepcopy leaves them as they are, so a copied model shares the communicator.
    def sum_of_ranks(grad: Tensor) -> Tensor:
        return comm.all_reduce(grad.clone())

    def hook_parameters(module: nn.Module, *args: object) -> None:
        # Parameters may have been replaced since the last forward, by deepcopy or
        # load_state_dict(assign=True), and these lose hooks.
        if torch.compiler.is_compiling():
            return
        for parameter in module.parameters():
            if parameter.requires_grad and _SUMMED not in parameter.__dict__:
                handle = None if exact_sum else parameter.register_hook(sum_of_ranks)
                parameter.__dict__[_SUMMED] = handle

    def release(module: nn.Module) -> None:
        for parameter in module.parameters():
            handle = parameter.__dict__.pop(_SUMMED, None)
            if handle is not None:
                handle.remove()

    hook: Any = hook_parameters
    hook.release = release
    hook(module)
    note_hook(module, module.register_forward_pre_hook(hook))
    if exact_sum is not None:
        note_hook(module, module.register_forward_hook(exact_sum))


def split_output(
    module: nn.Module, comm: Communicator, invariant: bool, heads: Heads | None = None
) -> None:
    """Make ``module`` return this rank's part of its output's last dimension. Gradients of its
    parameters and its input are whole on every rank."""

    def own_part(module: nn.Module, args: object, output: Tensor) -> Tensor:
        spans = shard_spans(output.shape[-1], comm.world_size, heads)
        return copy_to_ranks(output, comm).narrow(-1, *spans[comm.rank])

    note_hook(module, module.register_forward_hook(own_part))


def split_parameters(
    module: nn.Module, comm: Communicator, invariant: bool, heads: Heads | None = None
) -> None:
    """Let the forward of ``module`` see this rank's part of each of its own parameters, along the
    first dimension of more than one element, which counts heads. The whole ones are few elements,
    and stay on every rank, with whole gradients."""

    def show_parts(module: nn.Module, args: object) -> None:
        # An entry of __dict__ is found before the parameter of its name.
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dim = next((i for i, size in enumerate(parameter.shape) if size > 1), 0)
                spans = shard_spans(parameter.shape[dim], comm.world_size, heads)
                part = copy_to_ranks(parameter, comm).narrow(dim, *spans[comm.rank])
                module.__dict__[name] = part

    def show_whole(module: nn.Module, *args: object) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)

    note_hook(module, module.register_forward_pre_hook(show_parts))
    note_hook(module, module.register_forward_hook(show_whole, always_call=True))
