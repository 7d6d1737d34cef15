"""The Triton kernels of a product for each group of rows, as a mixture of experts has them.

Rows are sorted by groups. The sizes of the groups are read on the device, so a launch does not
wait for them: its grid has a program for as many tiles as there may be, and those beyond the last
tile end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipekernels.kernels.sharded_gemm import _finish, _load


@triton.jit
def _place_in_group(tile, ends, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """The group of a tile, its first row, and the end of the group's rows; group ``GROUPS`` if
    there are fewer tiles."""
    at = tl.arange(0, GROUPS)
    end = tl.load(ends + at, mask=at < groups, other=0)
    start = tl.load(ends + at - 1, mask=(at > 0) & (at < groups), other=0)
    tiles = tl.cdiv(end - start, BLOCK_M)
    tiles_before_end = tl.cumsum(tiles, 0)
    group = tl.sum((tiles_before_end <= tile).to(tl.int32), 0)
    first = start + (tile - tiles_before_end + tiles) * BLOCK_M
    row = tl.sum(tl.where(at == group, first, 0), 0)
    return group, row, tl.sum(tl.where(at == group, end, 0), 0)


@triton.jit(do_not_specialize=["N", "K", "groups"])
def grouped_kernel(
    x, w, bias, ends, out,  # [T, K], [E, N, K], [E, N] or None, int32 [E], [T, N]
    N, K, groups,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_om, stride_on,
    stride_be, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    X_VIA: tl.constexpr, W_VIA: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``x w_e^T + bias_e`` for the rows of each group e, which end before row ``ends[e]``."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    group, row, end = _place_in_group(tl.program_id(0) // tiles_n, ends, groups, BLOCK_M, GROUPS)
    if group < groups:
        col = tl.program_id(0) % tiles_n * BLOCK_N
        own = w + group.to(tl.int64) * stride_we
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            block_x = _load(x, row, k, end, K, stride_xm, stride_xk, BLOCK_M, BLOCK_K, X_VIA)
            block_w = _load(own, col, k, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, W_VIA)
            acc = tl.dot(block_x, block_w.T, acc, PRECISION)
        added = None, None, None, None
        if bias is not None:
            added = bias + group.to(tl.int64) * stride_be, None, None, None
        strides = stride_om, stride_on, stride_bn, 0, 0, 0, 0
        _finish(acc, out, row, col, end, N, added, strides, BLOCK_M, BLOCK_N, "pointers", OUT)


@triton.jit(do_not_specialize=["N", "K"])
def grouped_gradient_kernel(
    dy, x, ends, dw,  # [T, N], [T, K], int32 [E], [E, N, K]
    N, K,
    stride_dm, stride_dn, stride_xm, stride_xk, stride_we, stride_wn, stride_wk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DY_VIA: tl.constexpr, X_VIA: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dw_e = dy^T x`` over the rows of each group e; zero for a group without rows."""
    group = tl.program_id(0)
    tiles_k = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(1) // tiles_k * BLOCK_N
    k = tl.program_id(1) % tiles_k * BLOCK_K
    start = 0
    if group > 0:
        start = tl.load(ends + group - 1)
    end = tl.load(ends + group)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(tl.cdiv(end - start, BLOCK_M)):
        row = start + step * BLOCK_M
        block_dy = _load(dy, n, row, N, end, stride_dn, stride_dm, BLOCK_N, BLOCK_M, DY_VIA)
        block_x = _load(x, k, row, K, end, stride_xk, stride_xm, BLOCK_K, BLOCK_M, X_VIA)
        acc = tl.dot(block_dy, block_x.T, acc, PRECISION)
    added = None, None, None, None
    strides = stride_wn, stride_wk, 0, 0, 0, 0, 0
    own = dw + group.to(tl.int64) * stride_we
    _finish(acc, own, n, k, N, K, added, strides, BLOCK_N, BLOCK_K, "pointers", OUT)
