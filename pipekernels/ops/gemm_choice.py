"""Whether the product of a linear layer is Triton's or the vendor's library's, and how Triton
computes it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels.triton_kernels.config import TILES, Config, config_for, generation, precision_of
from pipekernels.triton_kernels.layout import has_rows, layout_of

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
    gpu = gpu_of(a.device)
    precision = precision_of(a.dtype, a.dtype == torch.float32 and tf32_allowed())
    check_triton(a.dtype, precision, gpu)
    assert precision is not None  # Else that has raised an error.
    # Only the configuration for unaligned operands reads and writes element by element.
    is_aligned = has_rows(out) and (residual is None or has_rows(residual))
    layout = layout_of(a, b) if is_aligned else None
    if layout is None or (a.dtype == FLOAT8 and layout != "forward"):
        return Config(TILES[gpu.generation, precision].unaligned)
    return config_for(gpu.generation, precision, len(a), len(b), a.shape[1], gpu.sms)


def check_triton(dtype: torch.dtype, precision: str | None, gpu: Gpu) -> None:
    """Raise if Triton does not multiply operands of ``dtype`` and ``precision`` on ``gpu``."""
    if precision is None:
        raise TypeError(
            f"the Triton kernel multiplies bfloat16, float16, float32 and float8_e4m3fn, not "
            f"{dtype}; use algorithm='auto'"
        )
    needed = (8, 9) if precision == "float8_e4m3fn" else (8, 0)
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
