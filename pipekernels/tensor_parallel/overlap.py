"""A row-parallel product whose all-reduce begins while the product is computed, where that is
predicted to be faster. Experimental: no GPU has run it yet.

The kernel of :mod:`pipekernels.kernels.sharded_gemm` runs on some of the multiprocessors and
announces each finished block of rows. On the others, in a stream of its own, the communicator
reduces the announced blocks. The results are bitwise those without overlap.

The prediction: a transfer of b bytes takes alpha + beta b (Hockney, 1994), and the product and the
reduction of blocks are a flow shop of two machines with equal jobs.
"""

from __future__ import annotations

import functools
import logging
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from pipekernels._log import info_once
from pipekernels.comm import Communicator, links
from pipekernels.comm.cuda import MOST_BLOCKS
from pipekernels.comm.links import LinkModel
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, kind_of
from pipekernels.kernels.layout import has_rows, layout_of
from pipekernels.local_ops.sharded_gemm import Chosen, choose, gpu_of, tf32_allowed

_log = logging.getLogger(__name__)

# At least this many blocks of rows: fewer hide less of the reduction, more wait more often.
ROW_BLOCKS = 8
GAIN = 1.05  # Least predicted speedup: the model ignores contention for memory.


# By generation of GPU: NVLink at 75% of its data sheet's rate per direction. Assumed, not measured;
# only where a caller insists on overlap.
LINK_MODELS = {
    80: LinkModel(4e-6, 1 / 225e9, 1 / 20e9),
    90: LinkModel(4e-6, 1 / 340e9, 1 / 25e9),
    100: LinkModel(4e-6, 1 / 675e9, 1 / 40e9),
}


def all_reduce_seconds(size: int, ranks: int, link: LinkModel, blocks: int = 0) -> float:
    """Predicted time to all-reduce ``size`` bytes over ``ranks`` by ``blocks`` thread blocks (0: as
    many as the link needs), in one step or in two, whichever is faster."""
    beta = max(link.beta, link.block_beta / blocks) if blocks else link.beta
    one_step = link.alpha + (ranks - 1) * size * beta
    two_steps = 2 * link.alpha + 2 * (ranks - 1) / ranks * size * beta
    return min(one_step, two_steps)


def overlapped_seconds(gemm: float, reduce: float, row_blocks: int) -> float:
    """Predicted time of a product and its reduction, pipelined in ``row_blocks`` equal parts."""
    first, last = gemm / row_blocks, reduce / row_blocks
    return max(gemm + last, first + reduce)


_PLAIN = "products on %s and their all-reduces run one after the other: %s"


class Overlap(NamedTuple):
    """How to run a product and its all-reduce at once.

    Attributes:
        config: of the product; ``group_m`` rows of tiles are announced as one block.
        reducing_blocks: thread blocks of the reduction.
        seconds: predicted time.
        plain_seconds: predicted time without overlap; infinite if unknown.
    """

    config: Config
    reducing_blocks: int
    seconds: float
    plain_seconds: float


def best_overlap(
    m: int, n: int, size: int, config: Config, seconds: float, plain_seconds: float,
    *, ranks: int, sms: int, link: LinkModel,
) -> Overlap:  # fmt: skip
    """The best way to run a product and its all-reduce at once, according to the model.

    The kernel computes its tiles in waves, one tile on each multiprocessor it has: leaving some to
    the reduction costs nothing until it takes one wave more.

    Args:
        m, n: rows and columns of the product.
        size: bytes of its result.
        config: of the kernel.
        seconds: the kernel's time with all multiprocessors.
        plain_seconds: the time of the fastest algorithm for the product alone.
        ranks: over how many the result is summed.
        sms: multiprocessors of a GPU.
        link: between the GPUs.
    """
    rows, columns = ceil(m / config.blocks.m), ceil(n / config.blocks.n)
    config = config._replace(group_m=max(1, min(config.group_m, rows // ROW_BLOCKS)))
    row_blocks = ceil(rows / config.group_m)
    fewest = ceil(rows * columns / sms)  # Waves.

    def total(blocks: int) -> float:
        reduce = all_reduce_seconds(size, ranks, link, blocks) + row_blocks * link.alpha
        waves = ceil(rows * columns / (sms - blocks))
        return overlapped_seconds(seconds * waves / fewest, reduce, row_blocks)

    # More than the link needs gain nothing. A partition of a GPU may have few multiprocessors:
    # leave at least half to the product.
    most = max(1, min(ceil(link.block_beta / link.beta), MOST_BLOCKS, sms // 2))
    sparing = (sms - ceil(rows * columns / waves) for waves in range(fewest, 2 * fewest + 1))
    blocks = min({max(1, min(each, most)) for each in sparing}, key=lambda b: (total(b), b))
    plain = plain_seconds + all_reduce_seconds(size, ranks, link)
    return Overlap(config, blocks, total(blocks), plain)


def choose_overlap(a: Tensor, b: Tensor, out: Tensor, ranks: int, algorithm: str) -> Overlap | None:
    """How to overlap ``out = a @ b.T`` with its all-reduce; ``None`` to run one after the other.

    Args:
        a, b, out: CUDA tensors.
        ranks: over how many ``out`` is to be summed.
        algorithm: ``'overlapped'`` forces overlap; ``'auto'`` overlaps if measurements on this GPU,
            of products and of links with so many ranks, predict a gain and no graph is being
            captured; others never do.
    """
    kind, layout = kind_of(a.dtype, tf32_allowed()), layout_of(a, b)
    forced = algorithm == "overlapped"
    (m, k), n = a.shape, b.shape[0]
    if not (forced or algorithm == "auto") or ranks == 1 or m * n * k == 0 or kind is None:
        return None
    # A graph may launch the reduction first, which would then hold what the product needs to start.
    if torch.cuda.is_current_stream_capturing() and not forced:
        return None
    gpu = gpu_of(a.device)
    link, size = links.for_gpu(gpu.name, ranks), out.numel() * out.itemsize
    if link is None:
        if not forced:
            info_once(_log, _PLAIN, gpu.name, "links between so many GPUs were not measured")
            return None
        link = LINK_MODELS[gpu.generation]
    known = table.for_gpu(gpu.name)
    entry = None
    if known is not None and layout is not None and has_rows(out):
        entry = known.entry(kind, layout, m, n, k)
    if entry is None or entry.config.split_k > 1:
        if not forced:
            info_once(_log, _PLAIN, gpu.name, "such products were not measured")
            return None
        chosen = choose(a, b, out, None, "triton")
        if chosen is None or chosen.config.split_k > 1:
            chosen = Chosen(Config(BLOCKS[gpu.generation, kind].full_tile[0]))
        config = chosen.config
        return best_overlap(
            m, n, size, config, 1.0, float("inf"), ranks=ranks, sms=gpu.sms, link=link
        )
    scale = m * n * k / (entry.shape.m * entry.shape.n * entry.shape.k)
    found = best_overlap(
        m, n, size, entry.config,
        scale * entry.seconds, scale * min(entry.seconds, entry.vendor_seconds),
        ranks=ranks, sms=gpu.sms, link=link,
    )  # fmt: skip
    if forced or found.seconds * GAIN < found.plain_seconds:
        return found
    info_once(_log, _PLAIN, gpu.name, f"no gain is predicted for {entry.shape}")
    return None


def gemm_all_reduce(
    a: Tensor, b: Tensor, out: Tensor, communicator: Communicator, overlap: Overlap
) -> None:
    """Compute ``out = a @ b.T`` and sum it over all ranks at the same time.

    The current stream then waits for both.

    Args:
        a, b: ``[m, k]`` and ``[n, k]``, on CUDA.
        out: ``[m, n]``, contiguous; best in symmetric memory.
        communicator: its ``all_reduce_when_ready`` is called, in another stream.
        overlap: how to overlap them. The same on all ranks.
    """
    from pipekernels.kernels.launch import Product, launch, tiles

    gpu, kind = gpu_of(a.device), kind_of(a.dtype, tf32_allowed())
    assert kind is not None  # choose_overlap() returns None for other dtypes.
    product = Product(kind, a, b, out)
    config, blocks = overlap.config, overlap.reducing_blocks
    rows, columns = tiles(product, config.blocks)
    with torch.cuda.device(a.device):
        ready = torch.zeros(ceil(rows / config.group_m), dtype=torch.int32, device=a.device)
        side = _side_stream(communicator.handle, a.device)
        side.wait_stream(torch.cuda.current_stream())
        # Launch the product first: the reduction's kernel waits for it on the GPU.
        launch(product, config, generation=gpu.generation, sms=gpu.sms - blocks, ready=ready)
        tiles_per_group, rows_per_group = config.group_m * columns, config.group_m * config.blocks.m
        with torch.cuda.stream(side):
            communicator.all_reduce_when_ready(
                out, ready, tiles_per_group, rows_per_group, blocks=blocks
            )
        torch.cuda.current_stream().wait_stream(side)


@functools.cache
def _side_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """A stream per communicator: ranks that are threads would deadlock in a shared one.

    High-priority streams come from another pool than the streams of users.
    """
    return torch.cuda.Stream(device, priority=-1)
