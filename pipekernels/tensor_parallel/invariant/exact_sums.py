"""Gradients of parameters that all heads share, with the same bits on any number of ranks.

Such a parameter (of Qwen3's norms of queries and keys) stands between column- and row-parallel
layers, where a rank has some of the heads, and its gradient is a sum over all of them. A module
that knows no heads cannot be run slab by slab. So the sum is taken in integers, whose order does
not matter (fixed-point accumulation, as in J. Demmel, H. D. Nguyen, Fast Reproducible
Floating-Point Summation, ARITH 2013): terms are rounded to multiples of a unit that is so small
that the sum of all just fits an int64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.ops.dispatch import check_differentiated_once
from pipekernels.tensor_parallel.invariant.slabs import check_eager

_BITS = 62  # Of the largest sum.


def exact_sum(terms: Tensor, comm: Communicator) -> Tensor:
    """The sum of ``terms``, ``[n, ...]``, over their first dimension and the ranks, in float64.

    Its error is at most ``n * world_size`` roundings to ``62 - log2(n * world_size)`` bits of the
    largest term; NaN if a term is not finite.
    """
    # So many bits for a term that the sum of all terms does not overflow.
    bits = _BITS - (terms.shape[0] * comm.world_size).bit_length()
    own = terms.abs().amax() if terms.numel() else terms.new_zeros(())
    largest = comm.all_reduce(own.double().view(1), "max")
    power = largest / (2 * torch.frexp(largest).mantissa)  # Of two, and at most `largest`.
    power = power.where(largest > 0, 1.0)
    # In units of the last of these bits, of the largest term of all ranks.
    units = (terms.double() / power * 2.0 ** (bits - 1)).round().long()
    total = comm.all_reduce(units.sum(0)).double() * 2.0 ** (1 - bits) * power
    return total.where(largest.isfinite(), torch.nan)


def check_own_parameters(module: nn.Module, name: str) -> None:
    """Raise ValueError if :func:`exact_gradients` would miss parameters of ``module``."""
    own = sum(p is not None for p in module._parameters.values())
    if own < sum(1 for _ in module.parameters()):
        raise ValueError(
            f"invariant=True: {name!r} ({type(module).__name__}), between column- and row-parallel "
            "layers, has modules with parameters in it, whose gradients could not be summed in "
            "every order in the same way; name these modules in the plan instead"
        )


def exact_gradients(comm: Communicator) -> Callable[..., Tensor]:
    """A forward hook: the gradients of the module's parameters are summed over its input's rows and
    over the ranks by :func:`exact_sum`. Each row of its output must depend on one row of its input.

    RuntimeError under ``torch.compile``, for inputs other than one positional argument, and in a
    backward if the module cannot take parameters of its input's shape."""

    # A function: deepcopy leaves it as it is, so a copied model shares the communicator.
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        parameters = [p for p in module._parameters.values() if p is not None]
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return output
        check_eager()
        if len(args) != 1:
            raise RuntimeError(
                f"invariant=True: {type(module).__name__}, between column- and row-parallel "
                f"layers, must take one positional argument, its rows, but got {len(args)}; wrap "
                "it in a module that does, or freeze it by .requires_grad_(False)"
            )
        result: Tensor = _Rows.apply([output.detach()], module, comm, *args, *parameters)
        return result

    return hook


class _Rows(torch.autograd.Function):
    """The module's output, computed before. The backward runs the module again, with parameters
    that are repeated for every row, so that their gradients are the terms of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        output: list[Tensor],
        module: nn.Module,
        comm: Communicator,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.module, ctx.comm = module, comm
        device = x.device.type
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.save_for_backward(x, *parameters)
        return output.pop()  # Not an input, which autograd would take for a view.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_differentiated_once("a module with invariant=True")
        # The forward again, from the saved input and in the same autocast, on a copy of the module
        # in whose ``_parameters`` each row has its own.
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        enabled, dtype = ctx.autocast
        module = copy.copy(ctx.module)
        names = [name for name, p in module._parameters.items() if p is not None]
        with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled):
            try:
                rows = [p.detach().expand(x.shape).requires_grad_() for p in parameters]
                module._parameters = module._parameters | dict(zip(names, rows, strict=True))
                output = type(module).forward(module, x)
            except RuntimeError as error:
                raise RuntimeError(
                    f"invariant=True: the gradients of {type(module).__name__}, between column- "
                    "and row-parallel layers, need it to take parameters that are repeated for "
                    f"every row, but: {error}; apply them in a separate operation, freeze "
                    "them by .requires_grad_(False), or do without invariant"
                ) from error
        # The gradients of the rows' parameters are the terms.
        grad_x, *terms = torch.autograd.grad(output, [x, *rows], grad)
        sums = (
            exact_sum(t.reshape(-1, *p.shape), ctx.comm).to(p.dtype)
            for p, t in zip(parameters, terms, strict=True)
        )
        return None, None, None, grad_x, *sums
