"""All-reduces of ranks that ``pipekernels run`` binds to the memory nodes of a host, by algorithm:
what ``make bench-host`` adds to the benchmarks, whose ranks run on any core."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from bench.peers.systems import ALGORITHMS
from bench.report.tables import duration, markdown
from pipekernels import Communicator

ROUNDS = 3


def main() -> None:
    """Print a table: medians of the slowest rank, algorithms in turn."""
    dist.init_process_group("gloo")
    lines = []
    with Communicator.from_process_group() as comm:
        for bits in range(12, 27, 2):
            x = torch.ones((1 << bits) // 4)
            samples: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
            for round_ in range(1 + ROUNDS):
                for name, found in samples.items():
                    for _ in range(20 if bits <= 20 else 3):
                        x.fill_(1)
                        comm.barrier()
                        begin = time.perf_counter()
                        comm.all_reduce(x, algorithm=name)
                        seconds = time.perf_counter() - begin
                        assert x.eq(comm.world_size).all(), f"{name} gave {x}"
                        found += [seconds] if round_ else []
            medians = torch.tensor([statistics.median(found) for found in samples.values()])
            dist.all_reduce(medians, dist.ReduceOp.MAX)
            lines.append([str(1 << bits), *map(duration, medians.tolist())])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {torch.get_num_threads()} threads each")
        print(markdown(["bytes", *samples], lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
