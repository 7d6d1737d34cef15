"""The products of sharded layers, each of which chooses once how it is computed.

:func:`linear` is that of one rank, :func:`row_linear` that of a row-parallel layer, summed over the
ranks. On CPUs, a few rows without derivatives have their own kernel, whose time is that of reading
the weight: the functions ``skinny_...`` return None where it does not apply, and the library
computes all others. On GPUs see :mod:`pipekernels.ops.gemm`. A compiled program calls the operators
at the end of this file, which make the same choice at run time, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels import _backend
from pipekernels._torch_private import needs_dispatcher, reference_to, tensors_of
from pipekernels.comm import Communicator
from pipekernels.comm.collectives import sum_of_outputs
from pipekernels.ops.gemm import as_matrix, gemm_into, sharded_gemm
from pipekernels.ops.int8_linear import blockwise_into, int8_linear, is_emulated


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``torch.nn.functional.linear(x, weight, bias)``, or None where the kernel does not apply: it
    takes up to four rows of contiguous CPU tensors of one floating dtype, without autograd.

    16-bit floats are computed with in float32, and rounded once. A row's result does not depend on
    the other rows.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``.
        bias: ``[n]``.
    """
    if not may_be_skinny(x, weight, bias):
        return None
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out if skinny_into(out, x, weight, bias) else None


def skinny_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """:func:`skinny_linear` into ``out``, of plain tensors, without autocast and derivatives;
    whether the kernel applied."""
    done: bool = _backend.load().skinny_gemm(out, x, weight, bias, torch.get_num_threads())
    return done


def skinny_partial(x: Tensor, weight: Tensor, slabs: int) -> Tensor | None:
    """``x W^T`` over the ``slabs`` of this rank, not rounded to the dtype of ``x``, or None where
    :func:`skinny_linear` does not apply either.

    ``k`` is cut into ``slabs`` equal parts. The sum over each is computed as if it were alone, and
    these sums are added in a balanced binary tree: ``((0 + 1) + (2 + 3)) + ...`` So however the
    slabs are distributed over ranks, each with the same power of two of them, the sum of the
    results in such a tree has the same bits on one machine. They may differ between instruction
    sets, and they depend neither on the other rows nor on the number of threads. A NaN has all bits
    set.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``, of the same dtype.
        slabs: a power of two that divides ``k``.

    Returns:
        ``[..., n]``, float64 for float64 and float32 for all else.

    Raises:
        ValueError: ``slabs`` is not a power of two that divides ``k``.
    """
    if not may_be_skinny(x, weight):
        return None
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    threads = torch.get_num_threads()
    done = _backend.load().skinny_gemm_partial(out, x, weight, slabs, threads)
    return out if done else None


def may_be_skinny(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether :func:`skinny_into` may be called: that finds memory, dtypes and shapes that do not
    fit."""
    if type(x) is not Tensor or not x.is_cpu or not is_bare(x, weight, bias):
        return False
    return bool(x.numel() <= _backend.load().SKINNY_ROWS * weight.shape[-1])


def is_bare(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product concerns neither autograd nor autocast nor a dispatch mode."""
    if needs_dispatcher() or torch.is_autocast_enabled("cpu"):
        return False
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return not (trained and torch.is_grad_enabled())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of one rank, for ``[..., k]``, ``[n, k]`` and ``[n]``."""
    y = native_linear(x, weight, bias)
    return library_linear(x, weight, bias) if y is None else y


def native_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """:func:`linear` without autograd: by the kernel for a few rows, or in a compiled program as
    an operator, which chooses when it runs. None where autograd or autocast are to see the product,
    and in programs for other devices than CPUs."""
    if not torch.compiler.is_compiling():
        return skinny_linear(x, weight, bias)
    if type(x) is not Tensor or not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained and torch.is_grad_enabled():
        return None
    result: Tensor = torch.ops.pipekernels.linear(x, weight, None, bias)
    return result


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` where :func:`native_linear` does not apply."""
    if x.is_cuda:
        return sharded_gemm(x, weight, bias)
    is_plain = type(x) is Tensor and x.is_cpu and x.dtype == weight.dtype
    if is_plain and is_bare(x, weight, bias) and is_emulated(x.dtype):
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        blockwise_into(as_matrix(out), as_matrix(x), weight, None, bias)
        return out
    return functional.linear(x, weight, bias)


SMALL_ROW = 1024
"""Bytes of a row up to which copying a result into symmetric memory is faster than allocating it
there, where peers read it in place."""


def skinny_row_linear(x: Tensor, weight: Tensor, comm: Communicator) -> Tensor | None:
    """:func:`row_linear` of operands that pass :func:`may_be_skinny`, by :func:`skinny_into`; None
    where that does not apply."""
    shape = (*x.shape[:-1], weight.shape[0])
    is_small = weight.shape[0] * x.itemsize <= SMALL_ROW
    out = x.new_empty(shape) if is_small else comm.output(shape, x)
    return comm.all_reduce(out) if skinny_into(out, x, weight) else None


def row_linear(
    x: Tensor, weight: Tensor, comm: Communicator, scatter: bool, scale: Tensor | None = None
) -> Tensor:
    """:func:`pipekernels.tensor_parallel.functional.row_linear` without autograd, of operands of
    one dtype, or with a ``weight`` of int8 and its ``scale`` ``[n]``, float32."""
    is_skinny = x.is_cpu and x.numel() <= _backend.load().SKINNY_ROWS * weight.shape[1]
    if is_skinny and scale is None and not scatter:
        y = skinny_row_linear(x, weight, comm)
        if y is not None:
            return y
    # In memory that the peers read in place, so that the sum needs no copy.
    out = comm.output((*x.shape[:-1], weight.shape[0]), x)
    rows, product = (x, out) if x.dim() == 2 else (as_matrix(x), as_matrix(out))
    if scale is not None:
        int8_linear(rows, weight, scale, out=product)
    elif x.is_cuda:
        gemm_into(product, rows, weight)
    elif x.is_cpu and is_emulated(x.dtype):
        blockwise_into(product, rows, weight)
    else:
        torch.mm(rows, weight.t(), out=product)
    return comm.reduce_scatter(out) if scatter else sum_of_outputs(comm, out)


# ---- the operators of compiled programs ----


def _linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if scale is None else int8_linear(x, weight, scale, bias)


def _row_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, handle: int, scatter: bool
) -> Tensor:
    return row_linear(x, weight, Communicator.from_handle(handle), scatter, scale)


def _linear_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


def _row_linear_fake(x: Tensor, weight: Tensor, _: Any, handle: int, scatter: bool) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if scatter:
        shape[0] //= Communicator.from_handle(handle).world_size
    return x.new_empty(shape)


_library = torch.library.Library("pipekernels", "FRAGMENT")


def _define(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define an operator. From torch 2.10 on the extension has kernels for CPU tensors, which need
    no Python for a few rows (``csrc/bindings/operators.cpp``), and call this one for all others."""

    # The extension passes tensors as capsules, and takes the result as one.
    def call(*arguments: Any) -> Any:
        numbers = (int, type(None))
        values = [a if isinstance(a, numbers) else tensors_of([a])[0] for a in arguments]
        return reference_to(kernel(*values))

    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipekernels::{name}", fake, lib=_library)
    _backend.python_kernels[name] = call


_define(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor", _linear, _linear_fake
)
_define(
    "row_linear(Tensor x, Tensor weight, Tensor? scale, int comm, bool scatter) -> Tensor",
    _row_linear,
    _row_linear_fake,
)
