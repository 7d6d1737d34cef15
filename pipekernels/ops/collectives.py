"""Functional, differentiable collectives over the ranks of a communicator.

Each one is a registered operation (schema, fake, autograd) that takes its communicator as an
integer handle, so it traces under ``torch.compile(fullgraph=True)``. No result aliases an input.
Arguments and errors as for :class:`pipekernels.Communicator`'s collectives. Results of
:func:`all_reduce` and :func:`broadcast` are symmetric, see :meth:`pipekernels.Communicator.empty`.

Autograd convention: the loss is the *sum* of the losses of all ranks, and every rank obtains the
derivative of that sum by its own input. Hence the backward of a sum over ranks is again a sum over
ranks, and the backward of a gather is a reduce-scatter, as in ``torch.distributed.nn``. If all
ranks compute the same (replicated) loss, use :mod:`pipekernels.tensor_parallel.functional`.

A backward is a collective too: all ranks must run it, in the same order, and an input must require
a gradient on all ranks or on none. On CUDA, ranks that are threads must run it under
``torch.autograd.set_multithreading_enabled(False)``, see :doc:`/guides/cuda`. Forward-mode
differentiation and ``torch.func`` raise a RuntimeError, as does the derivative of ``'max'`` and
``'min'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipekernels.comm.communicator import Communicator
from pipekernels.comm.tensors import (
    check_dense,
    check_has_rows,
    check_root,
    check_rows,
    check_tensor,
)
from pipekernels.ops.dispatch import can_skip_dispatcher, define, deny_tangents


def all_reduce(
    x: Tensor, comm: Communicator, op: str = "sum", algorithm: str = "auto", order: str = "rank"
) -> Tensor:
    """``x`` reduced elementwise over all ranks, as by :meth:`pipekernels.Communicator.all_reduce`,
    into a new tensor.

    Backward: the same reduction of the output gradients, in the same order.
    """
    _check("all_reduce", x, comm)
    return _call_all_reduce(x, comm, op, algorithm, order)


def reduce_scatter(x: Tensor, comm: Communicator, op: str = "sum", order: str = "rank") -> Tensor:
    """This rank's slice ``[k, ...]`` of the reduction of ``x`` ``[world_size * k, ...]`` over all
    ranks, as by :meth:`pipekernels.Communicator.reduce_scatter`.

    Backward: all-gather of the output gradients (divided by ``world_size`` for ``'avg'``). This is
    right for a replicated loss as well, since every rank holds different rows.
    """
    _check("reduce_scatter", x, comm)
    check_rows(x, comm.world_size)
    return _call_reduce_scatter(x, comm, op, order)


def all_gather(x: Tensor, comm: Communicator) -> Tensor:
    """The tensors ``[k, ...]`` of all ranks, concatenated along the first dimension in rank order,
    as by :meth:`pipekernels.Communicator.all_gather`.

    Backward: reduce-scatter (sum) of the output gradients.
    """
    _check("all_gather", x, comm)
    check_has_rows(x)
    return _call_all_gather(x, comm)


def broadcast(x: Tensor, comm: Communicator, src: int = 0) -> Tensor:
    """``x`` of rank ``src``, on every rank, as by :meth:`pipekernels.Communicator.broadcast`; the
    values on other ranks do not matter.

    Backward: on ``src`` the sum of all output gradients, on the others zeros.
    """
    _check("broadcast", x, comm)
    check_root(src, comm.world_size)
    return _call_broadcast(x, comm, src)


def _check(name: str, x: Any, comm: Any) -> None:
    """Raise TypeError for arguments of a wrong type, RuntimeError for forward-mode derivatives."""
    check_tensor(x, name)
    if not hasattr(comm, "handle"):
        raise TypeError(f"comm must be a Communicator, got {type(comm).__name__}")
    deny_tangents(name, [x])


def _register(
    schema: str,
    kernel: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    backward: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Register an operation, which takes its communicator by handle. Kernel, fake and backward take
    the communicator itself, as does the result, which bypasses the dispatcher where possible."""

    def of_handle(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, handle: int, *arguments: Any) -> Tensor:
            return function(x, Communicator.from_handle(handle), *arguments)

        return call

    # All arguments are kept, as the backward is a collective with the same.
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.handle, *ctx.arguments = inputs
        op = ctx.arguments[0] if "str op" in schema else "sum"
        if op not in ("sum", "avg"):
            raise RuntimeError(
                f"a reduction with op={op!r} has no gradient here, only 'sum' and 'avg' have one; "
                "pass x.detach()"
            )

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        comm = Communicator.from_handle(ctx.handle)
        return backward(grad, comm, *ctx.arguments), None, *[None for _ in ctx.arguments]

    operation = define(
        schema, of_handle(kernel), of_handle(fake), backward=differentiate, setup=setup
    )

    def call(x: Tensor, comm: Communicator, *arguments: Any) -> Tensor:
        if can_skip_dispatcher([x]):
            return kernel(x, comm, *arguments)
        result: Tensor = operation(x, comm.handle, *arguments)
        return result

    return call


def _symmetric_copy(x: Tensor, comm: Communicator) -> Tensor:
    check_dense(x)
    return comm.output(x.shape, x).copy_(x)


def _all_reduce(x: Tensor, comm: Communicator, op: str, algorithm: str, order: str) -> Tensor:
    return comm.all_reduce(_symmetric_copy(x, comm), op, algorithm=algorithm, order=order)


_call_all_reduce: Callable[..., Tensor] = _register(
    "all_reduce(Tensor x, int comm, str op, str algorithm, str order) -> Tensor",
    _all_reduce,
    fake=lambda x, comm, *_: x.new_empty(x.shape),
    backward=lambda grad, *arguments: _call_all_reduce(grad, *arguments),
)
_call_reduce_scatter: Callable[..., Tensor] = _register(
    "reduce_scatter(Tensor x, int comm, str op, str order) -> Tensor",
    lambda x, comm, op, order: comm.reduce_scatter(x, op, order=order),
    fake=lambda x, comm, *_: x.new_empty(x.shape[0] // comm.world_size, *x.shape[1:]),
    backward=lambda grad, comm, op, order: _call_all_gather(
        grad / (1 if op == "sum" else comm.world_size), comm
    ),
)
_call_all_gather: Callable[..., Tensor] = _register(
    "all_gather(Tensor x, int comm) -> Tensor",
    lambda x, comm: comm.all_gather(x),
    fake=lambda x, comm: x.new_empty(x.shape[0] * comm.world_size, *x.shape[1:]),
    backward=lambda grad, comm: _call_reduce_scatter(grad, comm, "sum", "rank"),
)


def _broadcast_backward(grad: Tensor, comm: Communicator, src: int) -> Tensor:
    total = _call_all_reduce(grad, comm, "sum", "auto", "rank")
    if comm.rank != src:
        # Zeros that depend on the sum: all ranks must run its backward for a second derivative.
        total = total.masked_fill(total.new_ones((), dtype=torch.bool), 0)
    return total


_call_broadcast: Callable[..., Tensor] = _register(
    "broadcast(Tensor x, int comm, int src) -> Tensor",
    lambda x, comm, src: comm.broadcast(_symmetric_copy(x, comm), src),
    fake=lambda x, comm, src: x.new_empty(x.shape),
    backward=_broadcast_backward,
)
