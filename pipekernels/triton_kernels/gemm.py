"""The Triton kernel of ``C = A B^T``: one for the forward and for both gradients of a linear layer.

A linear layer with input X [M, K] and weight W [N, K] has three products, and each is ``A B^T`` of
strided views: Y = X W^T; dX = dY (W^T)^T; dW = dY^T (X^T)^T. The kernel reads an operand through a
tensor descriptor (TMA), possibly transposed, or else through pointers and strides.

The grid is persistent: program p computes the items p, p + programs, p + 2 programs, ... Tiles are
ordered in groups of ``group_m`` rows of tiles, column by column inside a group: neighbours then
share operands in the L2 cache, and the groups are finished one after another.

Split-K: ``split_k`` items share a tile; a launch may have only the last tiles. Each item stores its
partial sum in float32, and the program that arrives last adds them all in the order of K. Which
program is last may differ from run to run, but the order of the sum does not, so the bits are
always the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(tile, tiles_m, tiles_n, group_m):
    """Row and column of a tile in grouped order."""
    per_group = group_m * tiles_n
    first = tile // per_group * group_m
    height = min(tiles_m - first, group_m)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def _gather(
    tensor, row, col, rows, cols, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """The block [ROWS, COLS] at (row, col) of a tensor [rows, cols]; zeros beyond its edges."""
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    at = r[:, None].to(tl.int64) * stride_row + c[None, :].to(tl.int64) * stride_col
    return tl.load(tensor + at, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)


@triton.jit
def _load(
    operand, row, k, rows, K, stride_row, stride_k,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, VIA: tl.constexpr,
):  # fmt: skip
    """The block [ROWS, DEPTH] at (row, k) of an operand [rows, K], read in its memory order."""
    if VIA == "descriptor":
        block = operand.load([row, k])
    elif VIA == "descriptor_t":
        block = operand.load([k, row]).T
    elif VIA == "pointers":
        block = _gather(operand, row, k, rows, K, stride_row, stride_k, ROWS, DEPTH)
    else:
        block = _gather(operand, k, row, K, rows, stride_k, stride_row, DEPTH, ROWS).T
    return block


@triton.jit
def _finish(
    acc, c, row, col, M, N, added, strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VIA: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Scale, add bias and residual in float32, round once, and store at (row, col)."""
    bias, residual, scale_a, scale_b = added
    stride_cm, stride_cn, stride_bias, stride_rm, stride_rn, stride_sa, stride_sb = strides
    m = row + tl.arange(0, BLOCK_M)
    n = col + tl.arange(0, BLOCK_N)
    if scale_a is not None:
        acc *= tl.load(scale_a + m * stride_sa, mask=m < M, other=0.0)[:, None]
    if scale_b is not None:
        acc *= tl.load(scale_b + n * stride_sb, mask=n < N, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + n * stride_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        block = _gather(residual, row, col, M, N, stride_rm, stride_rn, BLOCK_M, BLOCK_N)
        acc += block.to(tl.float32)
    if VIA == "descriptor":
        c.store([row, col], acc.to(OUT))
    else:
        at = m[:, None].to(tl.int64) * stride_cm + n[None, :].to(tl.int64) * stride_cn
        tl.store(c + at, acc.to(OUT), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _finish_tile(
    acc, c, row, col, M, N, added, strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, VIA: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """:func:`_finish` a tile in ``PARTS`` parts, a power of two, by halves of halves."""
    # A part is all that is converted and staged in shared memory at a time.
    if PARTS == 1:
        _finish(acc, c, row, col, M, N, added, strides, BLOCK_M, BLOCK_N, VIA, OUT)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _finish_tile(left, c, row, col, M, N, added, strides, BLOCK_M, HALF, PARTS // 2, VIA, OUT)
        _finish_tile(
            right, c, row, col + HALF, M, N, added, strides, BLOCK_M, HALF, PARTS // 2, VIA, OUT
        )


# No specialisation on values that change from call to call, which would compile again for each.
@triton.jit(do_not_specialize=["M", "group_m", "split_k", "items"])
def gemm_kernel(
    a, b, c,  # [M, K], [N, K], [M, N]: pointers, or descriptors where *_VIA says so
    bias, residual, scale_a, scale_b,  # [N], [M, N], [M], [N], each may be None
    partials, arrivals,  # float32 [tiles, split_k, BLOCK_M, BLOCK_N], int32 [tiles]; or None
    M, N, K, group_m, split_k, items,  # Items are tiles, times split_k.
    stride_am, stride_ak, stride_bn, stride_bk, stride_cm, stride_cn,
    stride_bias, stride_rm, stride_rn, stride_sa, stride_sb,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    A_VIA: tl.constexpr, B_VIA: tl.constexpr, C_VIA: tl.constexpr, OUT: tl.constexpr,
    PRECISION: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Compiled once per dtypes, blocks, ``*_VIA``, and set of arguments that are None."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(steps, split_k)
    added = bias, residual, scale_a, scale_b
    strides = stride_cm, stride_cn, stride_bias, stride_rm, stride_rn, stride_sa, stride_sb
    # Tiles and their steps are one loop, so that a tile's loads begin during the tile before it.
    # The barrier of shared tiles would prevent pipelining there.
    FLATTEN: tl.constexpr = partials is None
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        tile = item // split_k
        part = item % split_k
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, group_m)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PROMOTE > 1:
            short = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # The compiler can flatten the loops only if it sees that all tiles have the same steps.
        first = 0 if FLATTEN else part * share
        last = steps if FLATTEN else min(first + share, steps)
        for step in range(first, last):
            k = step * BLOCK_K
            block_a = _load(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, A_VIA)
            block_b = _load(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, B_VIA)
            # Tensor cores that keep too few bits: their sums are short, see config.py.
            if PROMOTE == 0:
                acc = tl.dot(block_a, block_b.T, acc, PRECISION)
            elif PROMOTE == 1:
                acc += tl.dot(block_a, block_b.T, input_precision=PRECISION)
            else:
                short = tl.dot(block_a, block_b.T, short, PRECISION)
                if step % PROMOTE == PROMOTE - 1:
                    acc += short
                    short = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PROMOTE > 1:
            acc += short
        if partials is None:
            _finish_tile(
                acc, c, row, col, M, N, added, strides, BLOCK_M, BLOCK_N, PARTS, C_VIA, OUT
            )
        else:
            SIZE: tl.constexpr = BLOCK_M * BLOCK_N
            at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            partial = partials + tile.to(tl.int64) * split_k * SIZE + at
            tl.store(partial + part * SIZE, acc)
            # All threads have stored before one of them counts: its release covers their stores.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == split_k - 1:
                # Its acquire covers the loads of all threads, which bypass the L1 cache: this is
                # not coherent, and may hold what the last launch stored there.
                tl.debug_barrier()
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for other in range(split_k):
                    total += tl.load(partial + other * SIZE, cache_modifier=".cg")
                _finish_tile(
                    total, c, row, col, M, N, added, strides, BLOCK_M, BLOCK_N, PARTS, C_VIA, OUT
                )
                tl.store(arrivals + tile, 0)  # Reset for the next launch.
