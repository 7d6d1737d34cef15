"""Replicated parameters between a column-parallel and a row-parallel layer.

There every rank sees its own features only, so such a parameter (Qwen3's norms of queries and keys)
gets a different partial gradient on each rank, and the ranks' copies would drift apart without an
error. :func:`sum_gradients` sums these gradients over the ranks; :func:`check_gradients` finds the
parameters that lack it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipekernels._torch_private import current_node, has_hooks
from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.arithmetic import Plain
from pipekernels.tensor_parallel.changes import add_forward_hook, add_forward_pre_hook
from pipekernels.tensor_parallel.functional import copy_to_ranks, shard_sizes

_OUTPUT_OF_COLUMNS = "pipekernels: output of a column-parallel layer"
# In the __dict__ of parameters, which a Pipe's aliases share.
_SUMMED = "_pipekernels_gradient_is_summed"
_SHARDED = "_pipekernels_is_sharded"


def sum_gradients(module: nn.Module, comm: Communicator, arithmetic: type[Plain]) -> None:
    """Sum the gradients of the parameters of ``module`` over the ranks, in every backward."""
    gradient_sum = arithmetic.gradient_sum(comm)
    hook = _SumGradients(comm, are_summed=gradient_sum is not None)
    hook(module)
    add_forward_pre_hook(module, hook)
    if gradient_sum is not None:
        add_forward_hook(module, gradient_sum)


class _SumGradients:
    """Forward pre-hook: parameters may have been replaced since the last forward, by ``deepcopy``
    or ``load_state_dict(assign=True)``, and these lose hooks."""

    def __init__(self, comm: Communicator, are_summed: bool) -> None:
        self._comm = comm
        self._are_summed = are_summed

    def __call__(self, module: nn.Module, *args: object) -> None:
        if torch.compiler.is_compiling():
            return
        for parameter in module.parameters():
            if parameter.requires_grad and _SUMMED not in parameter.__dict__:
                parameter.__dict__[_SUMMED] = (
                    None if self._are_summed else parameter.register_hook(self._sum)
                )

    def release(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            handle = parameter.__dict__.pop(_SUMMED, None)
            if handle is not None:
                handle.remove()

    def _sum(self, grad: Tensor) -> Tensor:
        return self._comm.all_reduce(grad.clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> _SumGradients:
        return self  # A copied model shares the communicator.


def split_output(module: nn.Module, comm: Communicator) -> None:
    """Let ``module`` return this rank's part of its output's last dimension."""
    add_forward_hook(module, _SplitOutput(comm))


class _SplitOutput:
    """Forward hook."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        sizes = shard_sizes(output.shape[-1], self._comm.world_size)
        parts: tuple[Tensor, ...] = output.split(sizes, -1)
        return parts[self._comm.rank]

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitOutput:
        return self


def split_parameters(module: nn.Module, comm: Communicator) -> None:
    """Let the forward of ``module`` see this rank's part of each of its own parameters, along the
    first dimension of more than one element, which counts heads. The whole ones are few elements,
    and stay on every rank, with whole gradients."""
    hook = _SplitParameters(comm)
    add_forward_pre_hook(module, hook)
    add_forward_hook(module, hook.show_whole, always_call=True)


class _SplitParameters:
    """Forward hooks. An entry of ``__dict__`` is found before the parameter of its name."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, module: nn.Module, args: object) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module.__dict__[name] = self._part(parameter)

    def _part(self, parameter: Tensor) -> Tensor:
        whole = copy_to_ranks(parameter, self._comm)
        dim = next((i for i, size in enumerate(parameter.shape) if size > 1), 0)
        sizes = shard_sizes(parameter.shape[dim], self._comm.world_size)
        part: Tensor = whole.split(sizes, dim)[self._comm.rank]
        mark_column_output(part, None)
        return part

    def show_whole(self, module: nn.Module, *args: object) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitParameters:
        return self


def mark_column_output(y: Tensor, bias: Tensor | None) -> None:
    """Let :func:`check_gradients` stop at ``y``, and at ``bias`` if it is added later."""
    if y.grad_fn is not None:
        _metadata(y.grad_fn)[_OUTPUT_OF_COLUMNS] = True
    if bias is not None:
        bias.__dict__[_SHARDED] = True


def _metadata(node: Node) -> dict[Any, Any]:
    metadata: Any = node.metadata  # torch's annotation says a method.
    return metadata  # type: ignore[no-any-return]


def check_gradients(layer: str) -> None:
    """Raise if a replicated parameter whose gradients are not summed is between column-parallel
    layers and a row-parallel one. Called in a hook on the input of the latter.

    Args:
        layer: name of the row-parallel layer, for the error.

    Raises:
        RuntimeError: there is one without a hook.
    """
    stack = [current_node()]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if _OUTPUT_OF_COLUMNS in _metadata(node):
            continue
        leaf = getattr(node, "variable", None)
        if (
            isinstance(leaf, nn.Parameter)
            and leaf.__dict__.keys().isdisjoint((_SUMMED, _SHARDED))
            and not has_hooks(leaf)
        ):
            raise RuntimeError(
                f"a parameter of shape {tuple(leaf.shape)} is used between column-parallel layers "
                f"and {layer}, where each rank has other features: its gradient would be another "
                "part of the sum on each rank; name its module in the plan of tensor_parallelize() "
                "as 'replicated_with_grad_allreduce'"
            )
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
