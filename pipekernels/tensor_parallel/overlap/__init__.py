"""A row-parallel product whose all-reduce begins while the product is computed. Experimental.

The kernel of :mod:`pipekernels.kernels.sharded_gemm` runs on some of the multiprocessors and
announces each finished block of rows. On the others, in its own stream, the communicator
reduces the announced blocks. The results are bitwise those without overlap.

Which products gain is measured by ``pipekernels tune``
(:mod:`pipekernels.tensor_parallel.overlap.tuning`), and saved with the products' measurements.
"""

from __future__ import annotations

import functools
import logging
import zlib
from math import ceil

import torch
from torch import Tensor

from pipekernels._log import info_once
from pipekernels.comm import Communicator
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, kind_of
from pipekernels.local_ops.gemm_choice import Chosen, gpu_of, tf32_allowed

_log = logging.getLogger(__name__)

ROW_BLOCKS = 8  # At least as many: fewer hide less of the reduction.
REDUCING_BLOCKS = 8  # Thread blocks of a reduction that was not measured.


def ranks_that_overlap(comm: Communicator, device: torch.device) -> int:
    """Over how many ranks ``'auto'`` may sum a product meanwhile; 1 if it may not. A collective at
    the first call: all ranks must decide the same."""
    if comm.world_size == 1:
        return 1
    key = comm.handle, device
    gains = _gains.get(key)
    # A graph may launch the reduction first, which would then hold what the product needs to start.
    if gains is False or torch.cuda.is_current_stream_capturing():
        return 1
    if gains is None:
        gains = _gains[key] = _measured_to_gain(comm, device)
    return comm.world_size if gains else 1


_gains: dict[tuple[int, torch.device], bool] = {}  # By the communicator's handle.


def _measured_to_gain(comm: Communicator, device: torch.device) -> bool:
    """Whether products were measured to gain, by the same measurements on all ranks."""
    gpu = gpu_of(device)
    known = table.for_gpu(gpu.name)
    checksum = torch.tensor([zlib.crc32(repr((gpu, known)).encode())], device=device)
    ranks_share_measurements = len(set(comm.all_gather(checksum).tolist())) == 1
    entries = () if known is None else known.entries.values()
    gains = any(ranks == comm.world_size for entry in entries for ranks, _ in entry.overlaps)
    if not (gains and ranks_share_measurements):
        why = "products on %s and their all-reduces run one after the other: %s"
        info_once(_log, why, gpu.name, "`pipekernels tune` has measured no gain on all ranks")
    return gains and ranks_share_measurements


def always(chosen: Chosen | None, a: Tensor) -> Chosen | None:
    """:func:`choose`'s answer for a product of ``a``, with overlap."""
    if chosen is None or chosen.config.split_k == 1:
        return chosen and chosen._replace(reducing_blocks=REDUCING_BLOCKS)
    kind = kind_of(a.dtype, tf32_allowed())
    assert kind is not None  # choose() returns None for other dtypes.
    config = Config(BLOCKS[gpu_of(a.device).generation, kind].full_tile[0])
    return Chosen(config, reducing_blocks=REDUCING_BLOCKS)


def gemm_all_reduce(a: Tensor, b: Tensor, out: Tensor, comm: Communicator, chosen: Chosen) -> None:
    """Compute ``out = a @ b.T`` and sum it over all ranks at the same time.

    The current stream then waits for both.

    Args:
        a, b: ``[m, k]`` and ``[n, k]``, on CUDA.
        out: ``[m, n]``, contiguous; best in symmetric memory.
        comm: its ``all_reduce_when_ready`` is called, in another stream.
        chosen: how the product is computed, and by how many thread blocks it is reduced. The same
            on all ranks.
    """
    from pipekernels.kernels.launch import Product, launch, tiles

    gpu, kind = gpu_of(a.device), kind_of(a.dtype, tf32_allowed())
    assert kind is not None  # choose() returns None for other dtypes.
    product = Product(kind, a, b, out)
    rows, columns = tiles(product, chosen.config.blocks)
    group = max(1, min(chosen.config.group_m, rows // ROW_BLOCKS))  # Announced as one block.
    config = chosen.config._replace(group_m=group)
    # A partition of a GPU may have few multiprocessors: leave at least half to the product.
    blocks = max(1, min(chosen.reducing_blocks, gpu.sms // 2))
    with torch.cuda.device(a.device):
        ready = torch.zeros(ceil(rows / group), dtype=torch.int32, device=a.device)
        side = _side_stream(comm.handle, a.device)
        side.wait_stream(torch.cuda.current_stream())
        # Launch the product first: the reduction's kernel waits for it on the GPU.
        launch(product, config, generation=gpu.generation, sms=gpu.sms - blocks, ready=ready)
        with torch.cuda.stream(side):
            comm.all_reduce_when_ready(
                out, ready, group * columns, group * config.blocks.m, blocks=blocks
            )
        torch.cuda.current_stream().wait_stream(side)


@functools.cache
def _side_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """A stream per communicator: ranks that are threads would deadlock in a shared one.

    High-priority streams come from another pool than the streams of users.
    """
    return torch.cuda.Stream(device, priority=-1)
