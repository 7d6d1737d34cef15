"""The ranks of a run: their devices and communicators, and timing that all of them agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.gpu.timing import events, synchronize
from pipekernels import Communicator, _backend

OURS = "pipekernels"
TIMEOUT = 60.0  # seconds of our collectives
LIMIT = timedelta(minutes=5)  # of the others: ranks wait while rank 0 measures a pipe
MOST_GPUS = 8
WARMUP = 2  # calls in each turn, as the turn before was another's
SAMPLE = 5e-3  # least seconds of a turn; short calls are repeated,
REPEATS = 100  # at most this often


@dataclass
class Ranks:
    """This rank's place among all.

    Attributes:
        rank, ranks: this one, and how many.
        device: of this rank.
        peer: the name of torch's backend that ours is compared with.
        communicator: ours; None where the GPUs have no peer access.
        control: a group of Gloo, by which the ranks agree.
        left_out: what is not measured, and why.
    """

    rank: int
    ranks: int
    device: torch.device
    peer: str
    communicator: Communicator | None
    control: dist.ProcessGroup
    left_out: str = ""

    def renew(self) -> None:
        """A new communicator, as a failure ends one. All ranks call this."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = Communicator.from_process_group(self.control, timeout=TIMEOUT)

    def sum(self, number: int) -> int:
        """The sum over all ranks."""
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.control)
        return int(total)

    def slowest(self, seconds: float) -> float:
        """The time of the rank that took longest."""
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        return float(longest)

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Per call, of ``count`` in a row that all ranks begin together; the slowest rank's."""
        for _ in range(WARMUP):
            call()
        synchronize(self.device)
        begin, end = events(self.device, 2)
        dist.barrier(self.control)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        synchronize(self.device)
        return self.slowest(begin.elapsed_time(end) * 1e-3 / count)

    def compare(
        self, candidates: Mapping[str, Callable[[], Any]], rounds: int
    ) -> dict[str, dict[str, float]]:
        """Summaries of all candidates, which take turns."""

        def turn(call: Callable[[], Any]) -> Callable[[], float]:
            once = self.seconds(call, 1)
            count = max(1, min(REPEATS, round(SAMPLE / max(once, 1e-9))))
            return lambda: self.seconds(call, count)

        turns = {name: turn(call) for name, call in candidates.items()}
        samples = harness.alternate(turns, warmup=1, rounds=rounds)
        return {name: harness.summary(times) for name, times in samples.items()}


def pairs_without_access(
    gpus: int, can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer
) -> list[tuple[int, int]]:
    """The pairs of GPUs of which one cannot read the other's memory."""
    return [
        (i, j)
        for i in range(gpus)
        for j in range(i + 1, gpus)
        if not (can_access(i, j) and can_access(j, i))
    ]


def told(pairs: list[tuple[int, int]], peer: str) -> str:
    """What follows from missing peer access."""
    named = ", ".join(f"{i} and {j}" for i, j in pairs)
    return (
        f"No peer access between GPUs {named}: our collectives read the memory of other GPUs, so "
        f"they and our row-parallel layer are left out, and {peer} is measured alone. Pipes work: "
        "their copies between these GPUs go through pinned memory of the host. (`nvidia-smi topo "
        "-p2p r` shows which GPUs can read each other; some virtual machines prevent it.)"
    )


def usable_gpus() -> int:
    """The number of GPUs to use.

    Raises:
        SystemExit: there are too few.
    """
    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(
            f"bench-nccl compares over 2 to {MOST_GPUS} GPUs, and torch {torch.__version__} sees "
            f"{count}. `make gpu-check` measures on one GPU; `python -m bench.nccl --device cpu "
            "--quick` shows on a CPU that this runs, with Gloo in NCCL's place."
        )
    return min(count, MOST_GPUS)


def join(device_type: str) -> Ranks:
    """Join the other ranks, by the environment that torchrun sets.

    Raises:
        SystemExit: there are fewer GPUs than ranks, or no build for this one.
    """
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        device, peer, missing = torch.device("cpu"), "Gloo", []
    else:
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        if local >= gpus:
            raise SystemExit(f"there is no GPU for rank {local}: start at most {gpus} ranks")
        device = torch.device("cuda", local)
        try:
            _backend.require_cuda(device)
        except RuntimeError as error:
            raise SystemExit(str(error)) from None
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=LIMIT, device_id=device)
        peer = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        together = min(gpus, int(os.environ.get("LOCAL_WORLD_SIZE", gpus)))
        missing = pairs_without_access(together)
    control = dist.new_group(backend="gloo", timeout=LIMIT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if missing:
        return Ranks(rank, ranks, device, peer, None, control, told(missing, peer))
    communicator = Communicator.from_process_group(control, timeout=TIMEOUT)
    return Ranks(rank, ranks, device, peer, communicator, control)
