"""Measures how fast the GPUs of this host reach each other, for several numbers of ranks.

The ranks are processes, one per GPU, started once. The first 2, 4, 8, ... of them make a
communicator, while the others sleep. No GPU has run this yet.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable

import torch

from pipekernels.comm import links
from pipekernels.comm.communicator import Communicator
from pipekernels.comm.cuda import MOST_BLOCKS
from pipekernels.comm.links import LinkModel
from pipekernels.comm.tuning import measure_by_size, measured, run_ranks

SIZE = 16 << 20  # Bytes of the reduction that is timed.
BLOCKS = [2**exponent for exponent in range(MOST_BLOCKS.bit_length())]

Seconds = Callable[[Callable[[], object]], float]


def gpu_seconds(call: Callable[[], object]) -> float:
    """Seconds that the current stream takes for ``call``, of ten in a row.

    Those of a call that is shorter than its launch are the launch's: so the measured ``alpha`` may
    be too large, which makes overlap look worse than it is.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e4


def measure(
    communicator: Communicator,
    device: torch.device,
    *,
    seconds: Seconds = gpu_seconds,
    rounds: int = 20,
) -> LinkModel:
    """Time reductions by 1, 2, 4, ... thread blocks; a collective, with the same result on all.

    A reduction in two steps of ``s`` bytes over ``n`` ranks by ``k`` blocks takes ``2 alpha +
    2 (n - 1) / n s max(beta, block_beta / k)``. Each time is the median of the slowest rank's.

    Args:
        communicator: of at least two ranks.
        device: of this rank.
        seconds: measures a call.
        rounds: how often each reduction is timed.

    Raises:
        ValueError: there is one rank, or the times are too noisy.
    """
    ranks = communicator.world_size
    if ranks < 2:
        raise ValueError(f"a link has at least 2 ranks, got {ranks}")
    tensor = communicator.empty(SIZE // 4, dtype=torch.float32, device=device).zero_()
    ready = torch.zeros(1, dtype=torch.int32, device=device)

    def median(count: int, blocks: int) -> float:
        def call() -> object:
            return communicator.all_reduce_when_ready(
                tensor[:count], ready, 0, count, op="max", blocks=blocks
            )

        call()  # The first one may load and allocate.
        samples = []
        for _ in range(rounds):
            communicator.barrier()
            samples.append(seconds(call))
        slowest = communicator.all_reduce(torch.tensor(samples, dtype=torch.float64), "max")
        return float(statistics.median(slowest.tolist()))

    least, volume = median(ranks, 1), 2 * (ranks - 1) / ranks * SIZE
    per_byte = [(median(SIZE // 4, blocks) - least) / volume for blocks in BLOCKS]
    link = LinkModel(least / 2, min(per_byte), per_byte[0])
    if not links.is_valid(link):
        raise ValueError(f"the times are too noisy, or something else uses the GPUs: {link}")
    return link


def tune() -> list[str]:
    """Measure the links of this host's GPUs, if there are several; save and report them."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return []
    gpu = torch.cuda.get_device_name(0)
    sizes = [2**exponent for exponent in range(1, 5) if 2**exponent < gpus] + [gpus]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(_rank, (folder, sizes), gpus)
            found = {int(ranks): LinkModel(*link) for ranks, link in measured(folder).items()}
    except Exception as error:  # noqa: BLE001 (There may be no peer access.)
        return [f"links between GPUs were not measured: {error}"]
    lines = [f"links between GPUs ({gpu}):"]
    lines += [
        f"  {ranks} ranks: {link.alpha * 1e6:.1f} us, {1e-9 / link.beta:.0f} GB/s, "
        f"{1e-9 / link.block_beta:.1f} GB/s per thread block"
        for ranks, link in found.items()
    ]
    return [*lines, f"written to {links.save(gpu, found)}"]


def _rank(rank: int, folder: str, sizes: list[int]) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    measure_by_size(rank, folder, sizes, lambda comm: measure(comm, device))
