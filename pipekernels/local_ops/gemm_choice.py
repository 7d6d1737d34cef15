"""Whether the product of a linear layer is Triton's or the vendor's library's, and how Triton
computes it: by measurements on GPUs of the same name (:mod:`pipekernels.kernels.table`)."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from pipekernels._log import info_once
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, candidates, generation, kind_of
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


class Chosen(NamedTuple):
    """How to run the Triton kernel.

    Attributes:
        config: its configuration.
        forced: whether the caller insists on Triton.
        launch_bound: whether the product takes less time than its launch by Python. Then the
            library is faster, except in a captured graph.
    """

    config: Config
    forced: bool = False
    launch_bound: bool = False


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
    (m, k), n = a.shape, b.shape[0]
    forced, auto = algorithm != "auto", algorithm == "auto"
    if algorithm == "cublas" or m * n * k == 0:
        return None
    gpu = gpu_of(a.device)
    known = table.for_gpu(gpu.name)
    if auto and a.dtype == FLOAT8:
        auto = out is not None and library_takes_float8(a, b, out)
    if auto and (known is None or not has_triton()):
        _log_library(gpu.name, known, None)
        return None
    dtype = dtype or a.dtype
    kind = kind_of(dtype, dtype == torch.float32 and tf32_allowed())
    if not auto:
        check_triton(a.dtype, kind, gpu)
    if kind is None:
        return None
    # Most products end here: looking at the layout takes the host longer. A log says why.
    may_gain = not auto or known is None or known.may_gain(kind, m, n, k)
    if not (may_gain or _log.isEnabledFor(logging.INFO)):
        return None
    layout = layout_of(a, b)
    is_aligned = m == 1 or n * a.itemsize % 16 == 0 if out is None else has_rows(out)
    if not is_aligned or (residual is not None and not has_rows(residual)):
        layout = None
    entry = None
    if known is not None and layout is not None:
        entry = known.entry(kind, layout, m, n, k)
    if auto and known is not None:
        if entry is None or not entry.wins:
            _log_library(gpu.name, known, entry)
            return None
        return Chosen(entry.config, launch_bound=entry.seconds < known.launch_seconds)
    if layout is None or (kind == "float8_e4m3fn" and layout != "forward"):
        return Chosen(Config(BLOCKS[gpu.generation, kind].unaligned), forced)
    config = entry.config if entry else candidates(gpu.generation, kind, m, n, k, gpu.sms)[0]
    return Chosen(config, forced)


def _log_library(gpu: str, known: table.Table | None, entry: table.Measurement | None) -> None:
    """Log, once, why ``auto`` leaves a product on a GPU to the vendor's library."""
    why = "such products were not measured"
    if known is None:
        why = "nothing was measured on this GPU; `pipekernels tune` does"
    elif not has_triton():
        why = f"the kernel needs {TRITON_REMEDY}"
    elif entry is not None:
        why = f"the library was as fast for {entry.shape}"
    info_once(_log, "sharded_gemm on %s is the vendor's library: %s", gpu, why)


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
