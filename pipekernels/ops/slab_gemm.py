"""Products whose inner dimension is cut into slabs, by Triton: the same bits for any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from pipekernels.ops.gemm_choice import gpu_of, has_triton, tf32_allowed
from pipekernels.triton_kernels.config import SLAB_BLOCKS, precision_of


def slab_gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    slabs: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """``a @ b.T + bias``, summed slab by slab and by a binary tree over the slabs, in float32.

    The bits of an element depend on its row of ``a``, its row of ``b``, its bias, and the sizes of
    the slabs.

    Args:
        a, b: ``[m, k]`` and ``[n, k]``, any strides.
        bias: ``[n]``.
        slabs: into how many slabs of equal sizes ``k`` is cut, a power of two.
        out_dtype: the result's; that of ``a`` if ``None``.

    Returns:
        ``[m, n]``; ``None`` where Triton cannot compute it: on CPUs, on GPUs before compute
        capability 8.0, in float64, and without Triton.

    Raises:
        RuntimeError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """
    precision = _precision_on_gpu(a)
    if precision is None or 0 in (*a.shape, len(b)):
        return None
    from pipekernels.triton_kernels.launch import Product, are_slabs_loaded, launch_slabs

    out = a.new_empty((len(a), len(b)), dtype=out_dtype or a.dtype)
    product = Product(precision, a, b, out, bias)
    if torch.cuda.is_current_stream_capturing() and not are_slabs_loaded(product, slabs):
        raise RuntimeError(
            f"the kernel for {tuple(a.shape)} times {tuple(b.t().shape)} in {slabs} slabs is not "
            "loaded yet, which a graph capture forbids; run the layer once before the capture"
        )
    launch_slabs(product, slabs, generation=gpu_of(a.device).generation)
    return out


def _precision_on_gpu(a: Tensor) -> str | None:
    """The type of the operands, if Triton can multiply them here."""
    if not a.is_cuda or not has_triton() or gpu_of(a.device).capability < (8, 0):
        return None
    precision = precision_of(a.dtype, tf32_allowed())
    return precision if precision in SLAB_BLOCKS else None
