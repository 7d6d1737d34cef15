"""A row-parallel product whose all-reduce begins while the product is computed. Experimental: no
GPU has run it yet.

The kernel of :mod:`pipekernels.kernels.sharded_gemm` runs on some of the multiprocessors and
announces each finished block of rows. On the others, in a stream of its own, the communicator
reduces the announced blocks. The results are bitwise those without overlap.

Which products gain is measured by ``pipekernels tune``
(:mod:`pipekernels.tensor_parallel.overlap.tuning`), and saved in a file in the user's cache folder,
by GPU and number of ranks.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipekernels import _cache
from pipekernels._log import info_once
from pipekernels.comm import Communicator
from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, Config, kind_of
from pipekernels.kernels.table import Shape
from pipekernels.local_ops.gemm_choice import Chosen, gpu_of, tf32_allowed

_log = logging.getLogger(__name__)

FORMAT = 1  # Increase it when a change of the kernels invalidates older measurements.
ROW_BLOCKS = 8  # At least as many: fewer hide less of the reduction.
REDUCING_BLOCKS = 8  # Thread blocks of a reduction that was not measured.

Gains = Mapping[Shape, int]
"""The classes of products that gain, and by how many thread blocks their sum is then taken."""


def gains(comm: Communicator, device: torch.device) -> Gains:
    """What ``'auto'`` overlaps. A collective at the first call: the ranks must decide alike. Empty
    while a graph is captured: it might launch the reduction first, which would then hold what the
    product needs to start."""
    key = comm.handle, device
    found = _agreed.get(key)
    if found is None:
        if comm.world_size == 1 or torch.cuda.is_current_stream_capturing():
            return {}
        gpu = gpu_of(device)
        found = for_gpu(gpu.name, comm.world_size) or {}
        known = repr((gpu, table.for_gpu(gpu.name), found))
        checksum = torch.tensor([zlib.crc32(known.encode())], device=device)
        if len(set(comm.all_gather(checksum).tolist())) > 1:
            found = {}
        if not found:
            why = "products on %s and their all-reduces run one after the other: %s"
            info_once(_log, why, gpu.name, "`pipekernels tune` has measured no gain on all ranks")
        _agreed[key] = found
    return {} if found and torch.cuda.is_current_stream_capturing() else found


_agreed: dict[tuple[int, torch.device], Gains] = {}  # By the communicator's handle.


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


# ---- the file of measurements ----


@functools.cache
def for_gpu(gpu: str, ranks: int) -> dict[Shape, int] | None:
    """What was measured with so many ranks on GPUs of this name; read once per process."""
    return load(gpu).get(ranks)


def path(gpu: str) -> Path:
    """Where ``pipekernels tune`` saves its measurements."""
    return _cache.file("overlap", gpu)


def load(gpu: str) -> dict[int, dict[Shape, int]]:
    """The measurements by number of ranks; with a warning, none if the file is not valid."""
    return _cache.read(path(gpu), FORMAT, _parse) or {}


def save(gpu: str, found: dict[int, dict[Shape, int]]) -> Path:
    """Replace the measurements of these numbers of ranks, and return the file's path."""
    records = [
        {"ranks": ranks, "blocks": blocks, **shape._asdict()}
        for ranks, products in sorted((load(gpu) | found).items())
        for shape, blocks in products.items()
    ]
    for_gpu.cache_clear()
    record = {"gpu": gpu, "date": _cache.now(), "products": records}
    return _cache.write(path(gpu), FORMAT, record)


def _parse(record: dict[str, Any]) -> dict[int, dict[Shape, int]]:
    found: dict[int, dict[Shape, int]] = {}
    for each in record["products"]:
        shape = Shape(*(each[name] for name in Shape._fields))
        numbers = each["ranks"], each["blocks"], *shape[2:]
        if any(type(number) is not int or number < 1 for number in numbers):
            raise ValueError(f"it has sizes that are not positive integers: {each}")
        found.setdefault(each["ranks"], {})[shape] = each["blocks"]
    return found
