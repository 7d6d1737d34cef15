"""``Y = X W^T`` of a linear layer, by Triton or by the vendor's library.

``algorithm='auto'`` calls ``torch.nn.functional.linear``, which is as fast as the Triton kernel or
faster, but for float8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipekernels._arguments import check_kind
from pipekernels._torch_private import scaled_mm
from pipekernels.ops.dispatch import define, deny_tangents
from pipekernels.ops.weights.base import as_matrix
from pipekernels.triton_kernels.config import (
    TILES,
    TRITON_REMEDY,
    Config,
    config_for,
    gpu_of,
    has_triton,
    precision_of,
    tf32_allowed,
)
from pipekernels.triton_kernels.layout import has_rows, layout_of

ALGORITHMS = ("auto", "triton", "cublas")
FLOAT8 = torch.float8_e4m3fn


def sharded_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> Tensor:
    """``x @ weight.T + bias + residual``, accumulated in float32 or wider (except that Hopper's and
    Ada's tensor cores sum up to 128 products of float8 in fewer bits).

    Both gradients are products of the same kind. TF32 and autocast apply as in
    ``torch.nn.functional.linear``.

    Args:
        x: ``[..., k]``, any strides.
        weight: ``[n, k]``, any strides, of the same dtype.
        bias: ``[n]``.
        residual: ``[..., n]``, like the result.
        scale_x: for float8 (e4m3) operands: float32, one element, or one per row of x; 1 if
            ``None``.
        scale_weight: the same, one per row of ``weight``.
        out_dtype: of the result of float8 operands; bfloat16 if ``None``.
        algorithm: ``'triton'``, ``'cublas'``, or ``'auto'``: see the module. For float8 ``'auto'``
            uses Triton where the library does not support the operands.

    Returns:
        ``[..., n]``, of the dtype of ``x``; for float8 operands of ``out_dtype``.

    Raises:
        TypeError: an argument is not a tensor; dtypes differ or are not supported; scales or
            ``out_dtype`` with other operands than float8; float8 where a gradient is needed.
        ValueError: shapes, scales or devices that do not fit; an unknown ``algorithm``.
        RuntimeError: ``'triton'`` on a GPU that is too old for it; on a GPU also forward-mode
            differentiation.
        ImportError: ``'triton'`` without Triton, or with one before 3.6.
    """
    _check(x, weight, bias, residual, scale_x, scale_weight, out_dtype, algorithm)
    device = x.device.type
    # is_autocast_enabled("meta") raises.
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    autocast = autocast and x.dtype not in (torch.float64, FLOAT8)
    if x.dtype != weight.dtype and not autocast:
        raise TypeError(
            f"x has dtype {x.dtype} but weight {weight.dtype}; convert one of them with .to(...)"
        )
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    # torch's own operation, which has all derivatives and casts by itself.
    if algorithm != "triton" and dtype != FLOAT8:
        y = functional.linear(x, weight, bias)
        return y if residual is None else y + residual
    # The registered one takes matrices and scales of one dimension, and casts nothing.
    matrix, n = as_matrix(x), weight.shape[0]
    residual = None if residual is None else as_matrix(residual)
    if autocast:
        matrix, weight = matrix.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
        residual = residual if residual is None else residual.to(dtype)
    deny_tangents("sharded_gemm", (t for t in (x, weight, bias, residual) if t is not None))
    scale_x, scale_weight = (
        scale if scale is None else scale.reshape(-1) for scale in (scale_x, scale_weight)
    )
    product: Tensor = _operation(
        matrix, weight, bias, residual, scale_x, scale_weight, out_dtype, algorithm
    )
    return product.view(*x.shape[:-1], n)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale_x: Tensor | None,
    scale_weight: Tensor | None,
    out_dtype: torch.dtype | None,
    algorithm: str,
) -> None:
    """Raise TypeError or ValueError for arguments of :func:`sharded_gemm` that do not fit."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    added = [t for t in (bias, residual, scale_x, scale_weight) if t is not None]
    for value in (x, weight, *added):
        check_kind("an operand of sharded_gemm", value, Tensor, "a tensor")
    n, rows, out_shape = weight.shape[0], math.prod(x.shape[:-1]), (*x.shape[:-1], weight.shape[0])
    if (
        (weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1])
        or (bias is not None and bias.shape != (n,))
        or (residual is not None and residual.shape != out_shape)
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, *added[:2]))
        raise ValueError(
            f"x [..., k], weight [n, k], bias [n] and residual [..., n] must agree, got {shapes}; "
            "weight has the layout of nn.Linear"
        )
    if any(t.device != x.device for t in (weight, *added)):
        devices = ", ".join(str(t.device) for t in (x, weight, *added))
        raise ValueError(f"all tensors must be on one device, got {devices}; move them with .to()")
    if algorithm == "triton" and not x.is_cuda:
        raise ValueError(f"algorithm='triton' needs CUDA tensors, got {x.device}; use 'auto'")
    # The rest is about scales, which float8 needs and no other dtype takes.
    if x.dtype != FLOAT8:
        if scale_x is not None or scale_weight is not None or out_dtype is not None:
            raise TypeError(f"scales and out_dtype belong to {FLOAT8} operands, not {x.dtype}")
        return
    if out_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    for name, scale, count in (("scale_x", scale_x, rows), ("scale_weight", scale_weight, n)):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, count)):
            raise ValueError(
                f"{name} must be float32 and have 1 or {count} elements, got {scale.dtype} and "
                f"{tuple(scale.shape)}"
            )


# ---- the choice between Triton and the vendor's library ----


def choose(
    a: Tensor, b: Tensor, out: Tensor, residual: Tensor | None = None, *, algorithm: str = "auto"
) -> Config | None:
    """How the Triton kernel computes ``out = a @ b.T``; ``None`` to use the vendor's library.

    Args:
        a, b, out: matrices on a GPU.
        residual: that is added.
        algorithm: as for :func:`pipekernels.ops.sharded_gemm`.
    """
    if algorithm == "cublas" or 0 in (*a.shape, len(b)):
        return None
    if algorithm == "auto" and (a.dtype != FLOAT8 or library_takes_float8(a, b, out)):
        return None
    gpu, precision = gpu_of(a.device), precision_of(a.dtype, tf32_allowed())
    if precision is None:
        raise TypeError(
            f"the Triton kernel multiplies bfloat16, float16, float32 and float8_e4m3fn, not "
            f"{a.dtype}; use algorithm='auto'"
        )
    needed = (8, 9) if a.dtype == FLOAT8 else (8, 0)
    if gpu.capability < needed:
        raise RuntimeError(
            f"{a.dtype} in Triton needs compute capability {needed[0]}.{needed[1]}, but {gpu.name} "
            f"has {gpu.capability[0]}.{gpu.capability[1]}; use another dtype or algorithm='cublas'"
        )
    if not has_triton():
        raise ImportError(f"algorithm='triton' needs {TRITON_REMEDY}")
    # Only the configuration for unaligned operands reads and writes element by element.
    is_aligned = has_rows(out) and (residual is None or has_rows(residual))
    layout = layout_of(a, b) if is_aligned else None
    if layout is None or (a.dtype == FLOAT8 and layout != "forward"):
        return Config(TILES[gpu.generation, precision].unaligned)
    return config_for(gpu.generation, precision, len(a), len(b), a.shape[1], gpu.sms)


def library_takes_float8(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """cuBLAS needs multiples of 16 and dense rows; with per-row scales a bfloat16 result."""
    (m, k), n = a.shape, b.shape[0]
    sizes = m > 0 and n > 0 and k > 0 and k % 16 == 0 and n % 16 == 0
    return sizes and layout_of(a, b) == "forward" and out.dtype == torch.bfloat16


# ---- the product by Triton, and by the vendor's library ----


def _by_triton(config: Config, out: Tensor, a: Tensor, b: Tensor, *terms: Tensor | None) -> None:
    from pipekernels.triton_kernels.launch import Product, launch

    gpu, precision = gpu_of(a.device), precision_of(a.dtype, tf32_allowed())
    assert precision is not None  # choose() returns None for other dtypes.
    with torch.cuda.device(a.device):
        product = Product(precision, a, b, out, *terms)
        launch(product, config, generation=gpu.generation, sms=gpu.sms)


def _by_library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> None:
    """Compute by the vendor's library, or in float32 where that does not support float8; on CPUs by
    torch's."""
    scale_a, scale_b = (
        torch.ones(1, dtype=torch.float32, device=a.device) if scale is None else scale
        for scale in (scale_a, scale_b)
    )
    if a.dtype != FLOAT8:
        torch.mm(a, b.t(), out=out)
    elif not (a.is_cuda and library_takes_float8(a, b, out)):
        out.copy_(a.float() @ b.float().t() * scale_a[:, None] * scale_b)
    else:
        if scale_a.numel() > 1 or scale_b.numel() > 1:  # cuBLAS needs both per row or per tensor.
            scale_a = scale_a.expand(a.shape[0])[:, None].contiguous()
            scale_b = scale_b.expand(b.shape[0])[None, :].contiguous()
        scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, out=out)
    for term in (bias, residual):
        if term is not None:
            out += term


# ---- the registered operation ----


# For the names of all arguments see the schema below.
def _sharded_gemm(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    *terms, _, algorithm = rest
    out = _sharded_gemm_fake(x, weight, *rest)
    config = choose(x, weight, out, terms[1], algorithm=algorithm) if x.is_cuda else None
    if config is None:
        _by_library(out, x, weight, *terms)
    else:
        _by_triton(config, out, x, weight, *terms)
    return out


def _sharded_gemm_fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    *_, out_dtype, _ = rest
    dtype = out_dtype or (torch.bfloat16 if x.dtype == FLOAT8 else x.dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *_, ctx.algorithm = inputs
    if x.dtype == FLOAT8:
        raise TypeError(
            f"a product of {FLOAT8} has no gradient here; detach its inputs, or multiply in "
            "bfloat16"
        )
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    # dX = dY W and dW = dY^T X, each as ``A B^T`` of views, by the same algorithm.
    rest = (*[None] * 5, ctx.algorithm)
    grad_x = _operation(grad, weight.t(), *rest) if needs_x else None
    grad_weight = _operation(grad.t(), x.t(), *rest) if needs_weight else None
    grad_bias = grad.sum(0) if needs_bias else None
    return grad_x, grad_weight, grad_bias, grad if needs_residual else None, *[None] * 4


_operation = define(
    "sharded_gemm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale_x, "
    "Tensor? scale_weight, ScalarType? out_dtype, str algorithm) -> Tensor",
    _sharded_gemm,
    _sharded_gemm_fake,
    backward=_backward,
    setup=_setup,
)
