"""Whether the product of a linear layer is Triton's or the vendor's library's, and how Triton
computes it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels.kernels.config import TILES, Config, config_for, generation, kind_of
from pipekernels.kernels.layout import has_rows, layout_of

_log = logging.getLogger(__name__)

FLOAT8 = torch.float8_e4m3fn
OLDEST_TRITON = "3.6"
TRITON_REMEDY = f"Triton {OLDEST_TRITON} or newer: pip install 'pipekernels[triton]'"


class Gpu(NamedTuple):
    """Properties of a GPU that the kernel depends on."""

    name: str
    capability: tuple[int, int]
    generation: int
    sms: int


@functools.cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    return Gpu(found.name, capability, generation(capability), found.multi_processor_count)


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


class Chosen(NamedTuple):
    """How to run the Triton kernel."""

    config: Config
    forced: bool = False  # Whether the caller insists on Triton.


MEASURED = "NVIDIA H200"
"""The GPU of the measurement. A lead of 7% at the speed of its memory says nothing of others, not
even of an H100, whose memory is slower."""

FASTER = {("bfloat16", "forward", 16, 8192, 28672)}
"""Kind, layout and sizes m, n, k of products that the kernel computed at least 3% faster than the
library, its launch by Python included, which takes longer than most products do
(``bench/results/nvidia-h200/gpu.sharded_gemm.json``). Tokens (k of a weight's gradient, else m)
stand for all numbers that round up to that power of two."""
FEATURES = {n for _, _, _, n, _ in FASTER}


def choose(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    residual: Tensor | None = None,
    *,
    algorithm: str = "auto",
    dtype: torch.dtype | None = None,
) -> Chosen | None:
    """How to run the Triton kernel for ``a @ b.T``; ``None`` to use the vendor's library.

    Args:
        a, b: matrices on a GPU.
        out: for the result; ``None`` for a new tensor.
        residual: that is added.
        algorithm: as for :func:`pipekernels.ops.sharded_gemm`.
        dtype: in which the product is computed, if not that of ``a``.
    """
    if algorithm == "cublas" or 0 in (*a.shape, len(b)):
        return None
    gpu, dtype = gpu_of(a.device), dtype or a.dtype
    kind = kind_of(dtype, dtype == torch.float32 and tf32_allowed())
    if algorithm == "auto":
        if a.dtype != FLOAT8:
            return _choose_measured(a, b, out, residual, kind, gpu)
        if out is not None and library_takes_float8(a, b, out):
            return None
    check_triton(a.dtype, kind, gpu)
    assert kind is not None  # Else that has raised an error.
    layout = _layout(a, b, out, residual)
    if layout is None or (a.dtype == FLOAT8 and layout != "forward"):
        config = Config(TILES[gpu.generation, kind].unaligned)
    else:
        config = config_for(gpu.generation, kind, len(a), len(b), a.shape[1], gpu.sms)
    return Chosen(config, forced=algorithm == "triton")


def _choose_measured(
    a: Tensor, b: Tensor, out: Tensor | None, residual: Tensor | None, kind: str | None, gpu: Gpu
) -> Chosen | None:
    """:func:`choose` by :data:`FASTER`; logs, once, why a product is the library's."""
    (m, k), n = a.shape, len(b)
    why = "it was as fast, or was not compared, for such products"
    if gpu.name != MEASURED:
        why = f"the kernel was measured on {MEASURED} only"
    elif not has_triton():
        why = f"the kernel needs {TRITON_REMEDY}"
    elif kind is not None and n in FEATURES:  # Looking at the layout takes the host longer.
        layout = _layout(a, b, out, residual)
        tokens_first = (_power_of_two(m), n, k)
        sizes = (m, n, _power_of_two(k)) if layout == "grad_weight" else tokens_first
        if (kind, layout, *sizes) in FASTER:
            return Chosen(config_for(gpu.generation, kind, m, n, k, gpu.sms))
    _log_library(gpu.name, why)
    return None


@functools.cache  # Once for each reason.
def _log_library(gpu: str, why: str) -> None:
    _log.info("sharded_gemm on %s is the vendor's library: %s", gpu, why)


def _layout(a: Tensor, b: Tensor, out: Tensor | None, residual: Tensor | None) -> str | None:
    """:func:`layout_of` a product whose other tensors are aligned; else ``None``."""
    is_aligned = len(a) == 1 or len(b) * a.itemsize % 16 == 0 if out is None else has_rows(out)
    if not is_aligned or (residual is not None and not has_rows(residual)):
        return None
    return layout_of(a, b)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def check_triton(dtype: torch.dtype, kind: str | None, gpu: Gpu) -> None:
    """Raise if Triton does not multiply operands of ``dtype`` and ``kind`` on ``gpu``."""
    if kind is None:
        raise TypeError(
            f"the Triton kernel multiplies bfloat16, float16, float32 and float8_e4m3fn, not "
            f"{dtype}; use algorithm='auto'"
        )
    needed = (8, 9) if kind == "float8_e4m3fn" else (8, 0)
    if gpu.capability < needed:
        raise RuntimeError(
            f"{dtype} in Triton needs compute capability {needed[0]}.{needed[1]}, but {gpu.name} "
            f"has {gpu.capability[0]}.{gpu.capability[1]}; use another dtype or algorithm='cublas'"
        )
    if not has_triton():
        raise ImportError(f"algorithm='triton' needs {TRITON_REMEDY}")


def library_takes_float8(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """cuBLAS needs multiples of 16 and dense rows; with per-row scales a bfloat16 result."""
    (m, k), n = a.shape, b.shape[0]
    sizes = m > 0 and n > 0 and k > 0 and k % 16 == 0 and n % 16 == 0
    return sizes and layout_of(a, b) == "forward" and out.dtype == torch.bfloat16
