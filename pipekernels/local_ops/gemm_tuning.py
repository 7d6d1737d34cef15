"""Measures the sharded GEMM against the vendor's library, for ``pipekernels tune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipekernels.kernels import table
from pipekernels.local_ops.gemm_choice import TRITON_REMEDY, has_triton
from pipekernels.local_ops.sharded_gemm import Terms, gemm_into

if TYPE_CHECKING:
    from pipekernels.kernels.launch import Product


def tune(seconds: float, kind: str) -> list[str]:
    """Measure products of row-parallel layers on the current GPU, and save the results.

    Args:
        seconds: time after which no further product is started.
        kind: of the operands, one of :data:`pipekernels.kernels.config.KINDS`.

    Returns:
        Lines to print for the user.
    """
    name = torch.cuda.get_device_name()
    if not has_triton():
        return [f"sharded_gemm on {name}: not measured, it needs {TRITON_REMEDY}"]
    from pipekernels.kernels import tuner

    lines = [f"sharded_gemm(algorithm='auto') on {name}:"]
    # Long products first, as time may run out: most time is spent in them, and short ones are many.
    tokens = sorted(tuner.TOKENS, reverse=True)
    shapes = tuner.row_parallel_shapes(tokens, kind=kind)
    found = tuner.measure(shapes, by_library, seconds=seconds, report=lines.append)
    faster = sum(entry.wins for entry in found.entries.values())
    lines.append(f"Triton for {faster} of {len(found.entries)} shapes, the library for all others")
    return [*lines, f"written to {table.save(found)}"]


def by_library(product: Product) -> None:
    """Compute a product by the vendor's library; kind ``tfloat32`` enables TF32 meanwhile."""
    matmul: Any = torch.backends.cuda.matmul
    name: str = "allow_tf32"
    value: Any = product.kind == "tfloat32"
    if hasattr(matmul, "fp32_precision"):  # As in tf32_allowed().
        name, value = "fp32_precision", "tf32" if value else "ieee"
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        _, a, b, out, _, _, scale_a, scale_b = product
        terms = Terms(scale_a=scale_a, scale_b=scale_b)
        gemm_into(out, a, b, terms, algorithm="cublas")
    finally:
        setattr(matmul, name, before)


def describe(gpu: str) -> str:
    """Summary of the measurements for GPUs of this name."""
    known = table.for_gpu(gpu)
    if known is None:
        return "not measured, cuBLAS for 'auto' (`pipekernels tune` measures)"
    return f"{len(known.entries)} shapes for 'auto', measured until {known.date}"
