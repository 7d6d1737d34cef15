"""``Y = X W^T`` of a linear layer, by Triton or by the vendor's library.

On a GPU ``algorithm='auto'`` looks up measurements on GPUs of the same name
(:mod:`pipekernels.kernels.table`) and uses the Triton kernel where it was faster; everywhere else,
and on CPUs, it calls ``torch.nn.functional.linear``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from pipekernels._log import info_once
from pipekernels._torch_private import scaled_mm
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, candidates, generation, kind_of
from pipekernels.kernels.layout import has_rows, layout_of
from pipekernels.local_ops.transforms import deny_tangents

_log = logging.getLogger(__name__)

ALGORITHMS = ("auto", "triton", "cublas")
FLOAT8 = torch.float8_e4m3fn
OLDEST_TRITON = "3.6"
TRITON_REMEDY = f"Triton {OLDEST_TRITON} or newer: pip install 'pipekernels[triton]'"


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
    """``x @ weight.T + bias + residual``, accumulated in float32 or wider.

    Both gradients are products of the same kind. float32 is rounded to TF32 where
    ``torch.backends.cuda.matmul`` allows it. Under autocast the product is computed in autocast's
    dtype, as by ``torch.nn.functional.linear``. Triton's sums of float8 products are in float32,
    too, except that Hopper's and Ada's tensor cores sum up to 128 of them in fewer bits (13 or
    more). No GPU has run these kernels.

    Args:
        x: ``[..., k]``, any strides.
        weight: ``[n, k]``, any strides, of the same dtype.
        bias: ``[n]``.
        residual: ``[..., n]``, like the result.
        scale_x: for float8 (e4m3) operands: float32, one element, or one per row of x; 1 if
            ``None``.
        scale_weight: likewise, one per row of ``weight``.
        out_dtype: of the result of float8 operands; bfloat16 if ``None``.
        algorithm: ``'triton'``, ``'cublas'``, or ``'auto'``: see the module. For float8 ``'auto'``
            uses Triton where the library does not support the operands.

    Returns:
        ``[..., n]``, of the dtype of ``x``; for float8 operands of ``out_dtype``.

    Raises:
        TypeError: an argument is not a tensor; dtypes differ; scales or ``out_dtype`` with other
            operands than float8; an ``out_dtype`` other than bfloat16, float16 and float32; float8
            where a gradient is needed; ``'triton'`` for a dtype that it does not support.
        ValueError: shapes that do not fit; scales that are not float32; tensors on several devices;
            an unknown ``algorithm``; ``'triton'`` for CPU tensors.
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
    if dtype != FLOAT8 and not _may_be_triton(x, weight, dtype, algorithm):
        y = functional.linear(x, weight, bias)
        return y if residual is None else y + residual
    if autocast:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
        residual = residual if residual is None else residual.to(dtype)
    deny_tangents("sharded_gemm", (t for t in (x, weight, bias, residual) if t is not None))
    rows, (n, k) = math.prod(x.shape[:-1]), weight.shape
    product: Tensor = torch.ops.pipekernels.sharded_gemm(
        x.reshape(rows, k),
        weight,
        bias,
        None if residual is None else residual.reshape(rows, n),
        None if scale_x is None else scale_x.reshape(-1),
        None if scale_weight is None else scale_weight.reshape(-1),
        out_dtype,
        algorithm,
    )
    return product.view(*x.shape[:-1], n)


def gemm_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    algorithm: str = "auto",
) -> None:
    """:func:`sharded_gemm` for matrices, into ``out`` and without autograd.

    Args:
        out: ``[m, n]``; may be symmetric memory.
        a, b: ``[m, k]`` and ``[n, k]``.
        bias, residual: ``[n]`` and ``[m, n]``.
        scale_a, scale_b: ``[m]`` or ``[1]``, and ``[n]`` or ``[1]``.
        algorithm: as in :func:`sharded_gemm`.
    """
    added = (bias, residual, scale_a, scale_b)
    if a.is_cuda and out.numel() > 0 and a.shape[1] > 0:
        chosen = choose(a, b, out, residual, algorithm)
        if chosen is not None and _by_triton(out, a, b, *added, chosen, algorithm != "auto"):
            return
    _by_library(out, a, b, *added)


class Gpu(NamedTuple):
    """Properties of a GPU that the kernel depends on."""

    name: str
    capability: tuple[int, int]
    generation: int
    sms: int


@functools.cache
def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    sms = properties.multi_processor_count
    return Gpu(properties.name, capability, generation(capability), sms)


def gpu_of(device: torch.device) -> Gpu:
    """Properties of a CUDA device's GPU."""
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def has_triton() -> bool:
    """Whether a Triton that is new enough is installed, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # A nightly build has another name.
        return True
    return TorchVersion(version) >= OLDEST_TRITON


def tf32_allowed() -> bool:
    """Whether torch may round float32 operands of matrix products to TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch >= 2.9, where allow_tf32 may raise.
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def measured(device: torch.device) -> table.Table | None:
    """The measurements on GPUs of this device's name."""
    return table.for_gpu(gpu_of(device).name)


class Chosen(NamedTuple):
    """How to run the Triton kernel.

    Attributes:
        config: its configuration.
        waits: whether the product takes less time than its launch by Python. Then the library is
            faster, except in a captured graph.
    """

    config: Config
    waits: bool = False


def choose(
    a: Tensor, b: Tensor, out: Tensor, residual: Tensor | None, algorithm: str
) -> Chosen | None:
    """How to run the Triton kernel for ``a @ b.T``; ``None`` to use the vendor's library."""
    kind = kind_of(a.dtype, tf32_allowed())
    if algorithm == "cublas" or (kind is None and algorithm == "auto"):
        return None
    layout = layout_of(a, b)
    if not all(tensor is None or has_rows(tensor) for tensor in (out, residual)):
        layout = None
    (m, k), n = a.shape, b.shape[0]
    gpu = gpu_of(a.device)
    entry = None
    known = table.for_gpu(gpu.name)
    if known is not None and kind is not None and layout is not None:
        entry = known.entry(kind, layout, m, n, k)
    waits = False
    if algorithm == "auto":
        if a.dtype == FLOAT8 and not _library_takes_float8(a, b, out):
            algorithm = "triton"
        elif entry is None or known is None or not entry.wins or not has_triton():
            _log_library(gpu.name, known, entry)
            return None
        else:
            waits = entry.seconds < known.launch_seconds
    _check_triton(a, kind, gpu)
    assert kind is not None
    if layout is None or (kind == "float8_e4m3fn" and layout != "forward"):
        return Chosen(Config(BLOCKS[gpu.generation, kind].unaligned))
    if entry is not None:
        return Chosen(entry.config, waits)
    return Chosen(candidates(gpu.generation, kind, m, n, k, gpu.sms)[0])


def _may_be_triton(x: Tensor, weight: Tensor, dtype: torch.dtype, algorithm: str) -> bool:
    """Whether to call the registered operation, which takes the host more time than the library.

    ``dtype`` is the one in which the product is computed.
    """
    if algorithm != "auto" or not x.is_cuda:
        return algorithm == "triton"
    if torch.compiler.is_compiling():  # The operation chooses when the compiled program runs.
        return True
    known = measured(x.device)
    if known is None or not has_triton():
        _log_library(gpu_of(x.device).name, known, None)
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    kind, (n, k) = kind_of(dtype, tf32_allowed()), weight.shape
    if kind is None or x.numel() == 0 or n == 0:
        return False
    rows = x.reshape(-1, k)
    layout = layout_of(rows, weight)
    if layout is None:
        return False
    entry = known.entry(kind, layout, len(rows), n, k)
    if entry is None or not entry.wins:
        _log_library(known.gpu, known, entry)
        return False
    if entry.seconds < known.launch_seconds:
        first = (x.device, entry) not in _short
        _short.add((x.device, entry))
        return first  # Once: the operation then loads the kernel, for later captures.
    return True


def _log_library(gpu: str, known: table.Table | None, entry: table.Entry | None) -> None:
    """Log, once, why ``auto`` leaves a product on a GPU to the vendor's library."""
    why = "such products were not measured"
    if known is None:
        why = "nothing was measured on this GPU; `pipekernels tune` does"
    elif not has_triton():
        why = f"the kernel needs {TRITON_REMEDY}"
    elif entry is not None:
        why = f"the library was as fast for {entry.shape}"
    info_once(_log, "sharded_gemm on %s is the vendor's library: %s", gpu, why)


_short: set[tuple[torch.device, table.Entry]] = set()  # Products seen that a launch outlasts.


def _check_triton(a: Tensor, kind: str | None, gpu: Gpu) -> None:
    if kind is None:
        raise TypeError(
            f"the Triton kernel multiplies bfloat16, float16, float32 and float8_e4m3fn, not "
            f"{a.dtype}; use algorithm='auto'"
        )
    needed = (8, 9) if kind == "float8_e4m3fn" else (8, 0)
    if gpu.capability < needed:
        raise RuntimeError(
            f"{a.dtype} in Triton needs compute capability {needed[0]}.{needed[1]}, but {gpu.name} "
            f"has {gpu.capability[0]}.{gpu.capability[1]}; use another dtype or algorithm='cublas'"
        )
    if not has_triton():
        raise ImportError(f"algorithm='triton' needs {TRITON_REMEDY}")


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
        if not isinstance(value, Tensor):
            raise TypeError(
                f"sharded_gemm works on tensors, got {type(value).__name__}; pass "
                "torch.as_tensor(...)"
            )
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x [..., k] and weight [n, k] must agree in k, got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}; weight has the layout of nn.Linear"
        )
    n, rows = weight.shape[0], math.prod(x.shape[:-1])
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [n] = [{n}], got {tuple(bias.shape)}")
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        raise ValueError(
            f"residual must be like the result, {(*x.shape[:-1], n)}, got {tuple(residual.shape)}"
        )
    if any(t.device != x.device for t in (weight, *added)):
        devices = ", ".join(str(t.device) for t in (x, weight, *added))
        raise ValueError(f"all tensors must be on one device, got {devices}; move them with .to()")
    if algorithm == "triton" and not x.is_cuda:
        raise ValueError(f"algorithm='triton' needs CUDA tensors, got {x.device}; use 'auto'")
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


# ---- the product by Triton, and by the vendor's library ----


def _by_triton(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    chosen: Chosen,
    forced: bool,
) -> bool:
    """Launch the Triton kernel if that is possible and fast; False if the library is to compute."""
    from pipekernels.kernels.launch import Product, is_loaded, launch

    gpu, kind = gpu_of(a.device), kind_of(a.dtype, tf32_allowed())
    assert kind is not None  # choose() returns None for other dtypes.
    product = Product(kind, a, b, out, bias, residual, scale_a, scale_b)
    with torch.cuda.device(a.device):
        if not forced and torch.cuda.is_current_stream_capturing():
            if not is_loaded(product, chosen.config):  # A capture must not load a kernel.
                return False
        elif not forced and chosen.waits:
            # Launch once, so that later captures find the kernel loaded.
            if not is_loaded(product, chosen.config):
                launch(product, chosen.config, generation=gpu.generation, sms=gpu.sms)
            return False
        launch(product, chosen.config, generation=gpu.generation, sms=gpu.sms)
    return True


def _by_library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
) -> None:
    """Compute by the vendor's library; on CPUs by torch's."""
    if a.dtype == FLOAT8:
        _float8_product(out, a, b, scale_a, scale_b)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(a, b.t(), out=out)
    else:
        torch.addmm(bias, a, b.t(), out=out)
    if residual is not None:
        out += residual


def _float8_product(
    out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None
) -> None:
    """The scaled product; computed in float32 where cuBLAS does not support the operands."""
    scale_a, scale_b = (
        torch.ones(1, dtype=torch.float32, device=a.device) if scale is None else scale
        for scale in (scale_a, scale_b)
    )
    if not (a.is_cuda and _library_takes_float8(a, b, out)):
        out.copy_(a.float() @ b.float().t() * scale_a[:, None] * scale_b)
        return
    if scale_a.numel() > 1 or scale_b.numel() > 1:  # cuBLAS needs both per row or both per tensor.
        scale_a = scale_a.expand(a.shape[0])[:, None].contiguous()
        scale_b = scale_b.expand(b.shape[0])[None, :].contiguous()
    scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, out=out)


def _library_takes_float8(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """cuBLAS needs multiples of 16 and dense rows; with per-row scales a bfloat16 result."""
    (m, k), n = a.shape, b.shape[0]
    sizes = m > 0 and n > 0 and k > 0 and k % 16 == 0 and n % 16 == 0
    return sizes and layout_of(a, b) == "forward" and out.dtype == torch.bfloat16


# ---- the registered operation ----


# For the names of all arguments see the schema below.
def _sharded_gemm(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    bias, residual, scale_x, scale_weight, _, algorithm = rest
    out = _sharded_gemm_fake(x, weight, *rest)
    gemm_into(out, x, weight, bias, residual, scale_x, scale_weight, algorithm)
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
    multiply, rest = torch.ops.pipekernels.sharded_gemm, (*[None] * 5, ctx.algorithm)
    grad_x = multiply(grad, weight.t(), *rest) if needs_x else None
    grad_weight = multiply(grad.t(), x.t(), *rest) if needs_weight else None
    grad_bias = grad.sum(0) if needs_bias else None
    return grad_x, grad_weight, grad_bias, grad if needs_residual else None, *[None] * 4


_library = torch.library.Library("pipekernels", "FRAGMENT")
_library.define(
    "sharded_gemm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale_x, "
    "Tensor? scale_weight, ScalarType? out_dtype, str algorithm) -> Tensor"
)
_library.impl("sharded_gemm", _sharded_gemm, "CompositeExplicitAutograd")
torch.library.register_fake("pipekernels::sharded_gemm", _sharded_gemm_fake, lib=_library)
torch.library.register_autograd(
    "pipekernels::sharded_gemm", _backward, setup_context=_setup, lib=_library
)
