"""The ranks of a run: their devices and communicators, and timing that all of them agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench import harness
from bench.timing import events, synchronize
from pipekernels import Communicator, _backend

OURS = "pipekernels"
TIMEOUT = 60.0  # seconds of our collectives
LIMIT = timedelta(minutes=5)  # of the others: ranks wait while rank 0 measures a pipe
MOST_GPUS = 8
WARMUP = 2  # calls in each turn, as the turn before was another's
SAMPLE = 5e-3  # least seconds of a turn; short calls are repeated,
REPEATS = 100  # at most this often
Row = dict[str, Any]
Calls = Mapping[str, Callable[[], Any]]


class Work(NamedTuple):
    """What the ranks do in a case.

    Attributes:
        calls: the candidates.
        wrong: the number of wrong elements, of all ranks together, after one call.
        fields: of the case's rows.
        busbw: gigabytes over the bus per gigabyte of ``size``, as nccl-tests' PERFORMANCE.md has
            them; 0 if that means nothing.
        prepare, restore: called before the calls are timed, and afterwards.
    """

    calls: Calls
    wrong: Callable[[Callable[[], Any]], int]
    fields: Row
    busbw: float = 0.0
    prepare: Callable[[], object] = dict
    restore: Callable[[], object] = dict


@dataclass
class Ranks:
    """This rank's place among all.

    Attributes:
        rank, ranks: this one, and how many.
        device: of this rank.
        peer: the torch backend that ours is compared with: NCCL, or Gloo on a CPU.
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
        longest = torch.tensor(begin.elapsed_time(end) * 1e-3 / count, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        return float(longest)

    def turn(self, call: Callable[[], Any]) -> Callable[[], float]:
        """A candidate, with enough calls for a turn of :data:`SAMPLE` seconds."""
        once = self.seconds(call, 1)
        count = max(1, min(REPEATS, round(SAMPLE / max(once, 1e-9))))
        return lambda: self.seconds(call, count)


def measure(
    work: Work, turn: Callable[[Callable[[], Any]], Callable[[], float]], rounds: int
) -> list[Row]:
    """A row per candidate; wrong elements are those before the calls are timed, and after."""
    wrong = {name: work.wrong(call) for name, call in work.calls.items()}
    work.prepare()
    turns = {name: turn(call) for name, call in work.calls.items()}
    samples = harness.alternate(turns, warmup=1, rounds=rounds)
    work.restore()
    rows = []
    for name, call in work.calls.items():
        row = {"candidate": name, **work.fields, **harness.summary(samples[name])}
        if work.busbw:
            row["algbw"] = work.fields["size"] / row["median"] / 1e9
            row["busbw"] = row["algbw"] * work.busbw
        rows.append({**row, "wrong": wrong[name] + work.wrong(call)})
    return rows


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


def join(device_type: str) -> Ranks:
    """Join the other ranks, by the environment that torchrun sets.

    Raises:
        SystemExit: there are fewer GPUs than ranks, or no build for this one.
    """
    missing: list[tuple[int, int]] = []
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        device, peer = torch.device("cpu"), "Gloo"
    else:
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        if local >= gpus:
            raise SystemExit(f"there is no GPU for rank {local}: start at most {gpus} ranks")
        device, peer = torch.device("cuda", local), "NCCL"
        try:
            _backend.require_cuda(device)
        except RuntimeError as error:
            raise SystemExit(str(error)) from None
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=LIMIT, device_id=device)
        missing = pairs_without_access(min(gpus, int(os.environ.get("LOCAL_WORLD_SIZE", gpus))))
    control = dist.new_group(backend="gloo", timeout=LIMIT)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device, peer, None, control)
    if missing:
        ranks.left_out = told(missing, peer)
    else:
        ranks.communicator = Communicator.from_process_group(control, timeout=TIMEOUT)
    return ranks
