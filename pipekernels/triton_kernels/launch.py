"""Launches the matrix products: access to operands, grids, and the memory for split-K."""

from __future__ import annotations

import contextlib
import functools
import threading
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from pipekernels.triton_kernels.config import SLAB_BLOCKS, Blocks, Config
from pipekernels.triton_kernels.gemm import gemm_kernel
from pipekernels.triton_kernels.layout import has_rows, signature
from pipekernels.triton_kernels.slab import slab_kernel

INPUT_PRECISIONS = {"tfloat32": "tf32"}
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SHARED_MEMORY = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # Bytes per program, at most.

INTERPRETED = not isinstance(gemm_kernel, JITFunction)

# One thread at a time compiles and loads: ranks that are threads launch the same kernel at once.
_loading = threading.Lock()
_loaded: set[tuple[Any, ...]] = set()


class Product(NamedTuple):
    """``out = (A B^T) * scale_a * scale_b + bias + residual``, on one device.

    Attributes:
        precision: one of :data:`pipekernels.triton_kernels.config.PRECISIONS`.
        a, b: [M, K] and [N, K], any strides.
        out: [M, N], any strides without overlap.
        bias: [N].
        residual: [M, N], any strides.
        scale_a, scale_b: float32, of one element, or [M] and [N].
    """

    precision: str
    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


def tiles(product: Product, blocks: Blocks) -> tuple[int, int]:
    """Rows and columns of tiles."""
    m, n = product.out.shape
    return ceil(m / blocks.m), ceil(n / blocks.n)


def launch(product: Product, config: Config, *, generation: int, sms: int) -> None:
    """Launch the kernel on the current stream and device. M, N and K must be positive.

    Args:
        product: what to compute.
        config: the kernel's configuration.
        generation: of the GPU, see :func:`pipekernels.triton_kernels.config.generation`.
        sms: how many multiprocessors to use.
    """
    precision, a, b, out, bias, residual, scale_a, scale_b = product
    blocks, group_m, split_k = config
    count = prod(tiles(product, blocks))
    partials = arrivals = None
    programs = count * split_k
    if split_k > 1:
        partials = a.new_empty(programs * blocks.m * blocks.n, dtype=torch.float32)
        arrivals = _zeros(a.device, count)
    # Each share of a tile has its own program; else programs are as many as run at once, and loop.
    if split_k == 1:
        programs = min(programs, sms * _residents(blocks, a.element_size(), generation))
    tma = generation >= 90
    a_via, a_operand, a_strides = _access(a, (blocks.m, blocks.k), tma)
    b_via, b_operand, b_strides = _access(b, (blocks.n, blocks.k), tma)
    c_operand: Any = out
    c_via, c_strides = "pointers", out.stride()
    if tma and split_k == 1 and has_rows(out):
        c_via, c_strides = "descriptor", (0, 0)
        c_operand = _descriptor(out, (blocks.m, blocks.n // blocks.parts))
    constants = (
        *out.shape, a.shape[1], group_m, split_k, count * split_k,
        *a_strides, *b_strides, *c_strides, 0 if bias is None else bias.stride(0),
        *((0, 0) if residual is None else residual.stride()),
        *(0 if s is None or s.numel() == 1 else s.stride(0) for s in (scale_a, scale_b)),
        blocks.m, blocks.n, blocks.k, blocks.parts, a_via, b_via, c_via, DTYPES[out.dtype],
        INPUT_PRECISIONS.get(precision, "ieee"), blocks.promote,
    )  # fmt: skip
    kernel = _key(product, blocks, split_k > 1)
    with contextlib.nullcontext() if kernel in _loaded else _loading:
        gemm_kernel[(programs,)](
            a_operand, b_operand, c_operand, bias, residual, scale_a, scale_b,
            partials, arrivals, *constants,
            num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True,
        )  # fmt: skip
        _loaded.add(kernel)


def launch_slabs(product: Product, slabs: int, *, generation: int) -> None:
    """Launch the kernel of :mod:`pipekernels.triton_kernels.slab` on the current stream and device.

    Args:
        product: without residual and scales; M, N and K must be positive.
        slabs: into how many slabs of equal sizes K is cut, a power of two.
        generation: of the GPU, see :func:`pipekernels.triton_kernels.config.generation`.
    """
    a, b, out, bias = product.a, product.b, product.out, product.bias
    blocks = SLAB_BLOCKS[product.precision]
    rows, columns = tiles(product, blocks)
    depth = a.shape[1] // slabs
    # A descriptor knows where the tensor ends, not where a slab does.
    tma = generation >= 90 and depth % blocks.k == 0
    a_via, a_operand, a_strides = _access(a, (blocks.m, blocks.k), tma)
    b_via, b_operand, b_strides = _access(b, (blocks.n, blocks.k), tma)
    kernel = _key(product, slabs, a.shape[1])
    with contextlib.nullcontext() if kernel in _loaded else _loading:
        slab_kernel[(rows * columns,)](
            a_operand, b_operand, out, bias, *out.shape, depth, 8,
            *a_strides, *b_strides, *out.stride(), 0 if bias is None else bias.stride(0),
            BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, A_VIA=a_via, B_VIA=b_via,
            PRECISION=INPUT_PRECISIONS.get(product.precision, "ieee"), OUT=DTYPES[out.dtype],
            SLABS=slabs, num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True,
        )  # fmt: skip
        _loaded.add(kernel)


def are_slabs_loaded(product: Product, slabs: int) -> bool:
    """Whether :func:`launch_slabs` neither compiles nor loads, which a graph capture forbids."""
    return _key(product, slabs, product.a.shape[1]) in _loaded


def _key(product: Product, *constants: Any) -> tuple[Any, ...]:
    """The key of the compiled kernel; for slabs it has their number and size."""
    tensors = product[1:]
    return product.precision, constants, *(None if t is None else signature(t) for t in tensors)


def _access(operand: Tensor, block: tuple[int, int], tma: bool) -> tuple[str, Any, tuple[int, ...]]:
    """How the kernel reads ``operand``: its ``*_VIA``, the argument to pass, and strides."""
    if tma and has_rows(operand):
        return "descriptor", _descriptor(operand, block), (0, 0)
    # The tensor cores cannot read transposed float8 tiles.
    if tma and operand.itemsize > 1 and has_rows(operand.t()):
        return "descriptor_t", _descriptor(operand.t(), block[::-1]), (0, 0)
    by_columns = operand.stride(0) == 1 != operand.stride(1)
    return "pointers_t" if by_columns else "pointers", operand, operand.stride()


def _descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    rows, columns = tensor.shape
    # The stride of a single row has no meaning, but a descriptor needs it aligned.
    stride = tensor.stride(0) if rows > 1 else ceil(columns / 16) * 16
    return TensorDescriptor(tensor, [rows, columns], [stride, 1], list(block))


def _residents(blocks: Blocks, itemsize: int, generation: int) -> int:
    """Programs that fit on a multiprocessor, by registers (255 per thread) and shared memory."""
    memory = (blocks.m + blocks.n) * blocks.k * itemsize * blocks.stages
    memory += blocks.m * blocks.n * 2 // blocks.parts
    return max(1, min(8 // blocks.warps, SHARED_MEMORY[generation] // memory))


_COUNTERS = 4096  # Per stream.


def _zeros(device: torch.device, count: int) -> Tensor:
    """``count`` zeroed counters, for a kernel that resets them."""
    # Kernels of one stream run one after another and share theirs. A graph may run beside all
    # other work, and so has its own.
    if device.type != "cuda" or count > _COUNTERS or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _counters(device, torch.cuda.current_stream(device).cuda_stream)[:count]


@functools.lru_cache(maxsize=256)
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
