"""A row-parallel product whose all-reduce begins while it is computed, where that pays.

Experimental: no GPU has run it yet.

The kernel of :mod:`pipekernels.kernels.sharded_gemm` announces each finished block of rows, on
fewer multiprocessors than there are; on the others the communicator reduces the announced blocks,
in a stream of its own. The product's bits do not depend on that, nor do those of the sum.

Times are compared by an alpha-beta model: a transfer of b bytes takes alpha + beta b (Hockney,
1994). The product and the reduction of blocks are a flow shop of two machines with equal jobs.
"""

from __future__ import annotations

import functools
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from pipekernels.comm import Communicator
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, kind_of
from pipekernels.kernels.layout import has_rows, layout_of
from pipekernels.local_ops.sharded_gemm import Chosen, choose, gpu_of, tf32_allowed

# Fewer blocks of rows hide less, more of them wait more often.
ROW_BLOCKS = 8
REDUCING_BLOCKS = (4, 8, 16)
# By how much the overlap must be faster in the model, which knows nothing of contention for memory.
GAIN = 1.05


class LinkModel(NamedTuple):
    """Between GPUs that reach each other directly.

    Attributes:
        alpha: seconds until every rank has seen a signal of every other.
        beta: seconds per byte that a GPU reads from its peers.
        block_beta: seconds per byte that one thread block can read from them.
    """

    alpha: float
    beta: float
    block_beta: float


# NVLink of the generation, a quarter below its data sheet's rate per direction. Assumed, not
# measured.
LINK_MODELS = {
    80: LinkModel(4e-6, 1 / 225e9, 1 / 20e9),
    90: LinkModel(4e-6, 1 / 340e9, 1 / 25e9),
    100: LinkModel(4e-6, 1 / 675e9, 1 / 40e9),
}


def all_reduce_seconds(size: int, ranks: int, link: LinkModel, blocks: int = 0) -> float:
    """Of ``size`` bytes over ``ranks``: in one step or in two, whichever is faster.

    Args:
        size: in bytes.
        ranks: how many.
        link: between any two of them.
        blocks: how many thread blocks do it; 0 for as many as the link needs.
    """
    beta = max(link.beta, link.block_beta / blocks) if blocks else link.beta
    one_step = link.alpha + (ranks - 1) * size * beta
    two_steps = 2 * link.alpha + 2 * (ranks - 1) / ranks * size * beta
    return min(one_step, two_steps)


def overlapped_seconds(gemm: float, reduce: float, row_blocks: int) -> float:
    """Of a product and a reduction, each in ``row_blocks`` equal parts, one behind the other."""
    first, last = gemm / row_blocks, reduce / row_blocks
    return max(gemm + last, first + reduce)


class Overlap(NamedTuple):
    """How to run the two at once.

    Attributes:
        config: of the product; a group of its rows of tiles is announced as one block.
        reducing_blocks: thread blocks of the reduction.
        seconds: that the model gives it.
        plain_seconds: and to one after the other; infinite where that is not known.
    """

    config: Config
    reducing_blocks: int
    seconds: float
    plain_seconds: float


def best_overlap(
    m: int, size: int, config: Config, seconds: float, plain_seconds: float,
    *, ranks: int, sms: int, link: LinkModel,
) -> Overlap:  # fmt: skip
    """The best way to run a product and its all-reduce at once; a pure function.

    Args:
        m: rows of the product.
        size: bytes of its result.
        config: of the kernel.
        seconds: the kernel's time, with all multiprocessors.
        plain_seconds: that of the fastest way to the product alone.
        ranks: over how many the result is summed.
        sms: multiprocessors of a GPU.
        link: between the GPUs.
    """
    tiles = ceil(m / config.blocks.m)
    config = config._replace(group_m=max(1, min(config.group_m, tiles // ROW_BLOCKS)))
    row_blocks = ceil(tiles / config.group_m)

    def total(blocks: int) -> float:
        reduce = all_reduce_seconds(size, ranks, link, blocks) + row_blocks * link.alpha
        return overlapped_seconds(seconds * sms / (sms - blocks), reduce, row_blocks)

    # A part of a GPU may have few multiprocessors: the product keeps half of them at least.
    blocks = min((min(blocks, max(1, sms // 2)) for blocks in REDUCING_BLOCKS), key=total)
    plain = plain_seconds + all_reduce_seconds(size, ranks, link)
    return Overlap(config, blocks, total(blocks), plain)


def choose_overlap(a: Tensor, b: Tensor, out: Tensor, ranks: int, algorithm: str) -> Overlap | None:
    """How to overlap ``out = a @ b.T`` and its all-reduce; ``None`` where that does not pay.

    Args:
        a, b, out: CUDA tensors.
        ranks: over how many ``out`` is to be summed.
        algorithm: ``'overlapped'`` for a way at any price, ``'auto'`` for one that is predicted
            to be faster by what has been measured on this GPU, but not while a graph is captured;
            ``None`` for all others.
    """
    kind, layout = kind_of(a.dtype, tf32_allowed()), layout_of(a, b)
    forced = algorithm == "overlapped"
    (m, k), n = a.shape, b.shape[0]
    if not (forced or algorithm == "auto") or ranks == 1 or m * n * k == 0 or kind is None:
        return None
    # A graph may begin with the reduction, and give it what the product needs to begin.
    if torch.cuda.is_current_stream_capturing() and not forced:
        return None
    gpu = gpu_of(a.device)
    link, size = LINK_MODELS[gpu.generation], out.numel() * out.itemsize
    known = table.for_gpu(gpu.name)
    entry = None
    if known is not None and layout is not None and has_rows(out):
        entry = known.entry(kind, layout, m, n, k)
    if entry is None or entry.config.split_k > 1:
        if not forced:
            return None
        chosen = choose(a, b, out, None, "triton")
        if chosen is None or chosen.config.split_k > 1:
            chosen = Chosen(Config(BLOCKS[gpu.generation, kind].whole[0]))
        config = chosen.config
        return best_overlap(m, size, config, 1.0, float("inf"), ranks=ranks, sms=gpu.sms, link=link)
    part = m * n * k / (entry.shape.m * entry.shape.n * entry.shape.k)
    found = best_overlap(
        m, size, entry.config,
        part * entry.seconds, part * min(entry.seconds, entry.vendor_seconds),
        ranks=ranks, sms=gpu.sms, link=link,
    )  # fmt: skip
    return found if forced or found.seconds * GAIN < found.plain_seconds else None


def gemm_all_reduce(
    a: Tensor, b: Tensor, out: Tensor, communicator: Communicator, overlap: Overlap
) -> None:
    """``out``, this rank's ``a @ b.T``, summed over all ranks while it is computed.

    Work that follows in the current stream comes after both.

    Args:
        a, b: ``[m, k]`` and ``[n, k]``, on CUDA.
        out: ``[m, n]``, contiguous; best in symmetric memory.
        communicator: whose ``all_reduce_when_ready`` is called, in another stream.
        overlap: how. The same on all ranks.
    """
    from pipekernels.kernels.launch import Product, launch, tiles

    gpu, kind = gpu_of(a.device), kind_of(a.dtype, tf32_allowed())
    assert kind is not None  # Or nothing would be overlapped.
    product = Product(kind, a, b, out)
    config = overlap.config
    rows, columns = tiles(product, config.blocks)
    with torch.cuda.device(a.device):
        ready = torch.zeros(ceil(rows / config.group_m), dtype=torch.int32, device=a.device)
        side = _side_stream(communicator.handle, a.device)
        side.wait_stream(torch.cuda.current_stream())
        # First the product: the reduction waits for it, on the GPU.
        launch(
            product,
            config,
            generation=gpu.generation,
            sms=gpu.sms - overlap.reducing_blocks,
            ready=ready,
        )
        with torch.cuda.stream(side):
            communicator.all_reduce_when_ready(
                out,
                ready,
                config.group_m * columns,
                config.group_m * config.blocks.m,
                blocks=overlap.reducing_blocks,
            )
        torch.cuda.current_stream().wait_stream(side)


@functools.cache
def _side_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """A communicator's own: in a stream shared by ranks that are threads, they could wait in a
    circle.

    Streams of high priority come from a pool apart from the one that users' streams come from.
    """
    return torch.cuda.Stream(device, priority=-1)
