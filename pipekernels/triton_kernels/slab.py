"""The Triton kernel of ``C = A B^T`` whose inner dimension is cut into slabs.

A program computes one tile. It multiplies slab by slab, each with a sum that begins at zero, and
adds these sums by a balanced binary tree, as a binary counter carries: ``ones`` holds a sum of one
slab that waits for its neighbour, ``twos`` one of two, ``fours`` one of four. The blocks are the
same for all shapes. So the bits of an element depend on its row of A, its row of B and the sizes of
the slabs, but not on the other rows, and a product over half of the slabs is half of the tree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipekernels.triton_kernels.gemm import _finish, _load, _place


@triton.jit(do_not_specialize=["M"])
def slab_kernel(
    a, b, c, bias,  # [M, K], [N, K], [M, N], [N] or None: pointers, or descriptors by *_VIA
    M, N, depth, group_m,  # A slab has ``depth`` columns of A and B.
    stride_am, stride_ak, stride_bn, stride_bk, stride_cm, stride_cn, stride_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_VIA: tl.constexpr, B_VIA: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """Compiled once per dtypes, ``*_VIA``, number of slabs, and whether there is a bias."""
    tile_m, tile_n = _place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), group_m)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ones, twos, fours = total, total, total
    for slab in range(SLABS):
        start = slab * depth
        end = start + depth
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(depth, BLOCK_K)):
            k = start + step * BLOCK_K
            block_a = _load(a, row, k, M, end, stride_am, stride_ak, BLOCK_M, BLOCK_K, A_VIA)
            block_b = _load(b, col, k, N, end, stride_bn, stride_bk, BLOCK_N, BLOCK_K, B_VIA)
            total = tl.dot(block_a, block_b.T, total, PRECISION)
        if SLABS > 1:
            if slab % 2 == 0:
                ones = total
            else:
                total = ones + total
                if slab % 4 == 1:
                    twos = total
                else:
                    total = twos + total
                    if slab % 8 == 3:
                        fours = total
                    else:
                        total = fours + total
    added = bias, None, None, None
    strides = stride_cm, stride_cn, stride_bias, 0, 0, 0, 0
    _finish(total, c, row, col, M, N, added, strides, BLOCK_M, BLOCK_N, "pointers", OUT)
