"""Act 3: ``dist.all_reduce`` on the backend ``pipekernels`` and on Gloo, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from tqdm import tqdm

from demo.ranks import RANKS, processes
from demo.results import Check, SpeedUp, Spread
from demo.sizes import Sizes

OURS, GLOO = "pipekernels", "Gloo"
FEW_CALLS_FROM = 1 << 20  # Bytes.

Times = dict[str, list[float]]  # Microseconds of each call, by backend.


@dataclass(frozen=True)
class AllReduces:
    """Results of act 3; microseconds by backend and bytes."""

    microseconds: dict[str, dict[int, Spread]]
    speed_ups: list[SpeedUp]
    checks: list[Check]


def run(sizes: Sizes) -> AllReduces:
    """Time all-reduces of all sizes."""
    print(f"\nAct 3: dist.all_reduce of float32 tensors on {RANKS} ranks, on CPUs")
    microseconds: dict[str, dict[int, Spread]] = {OURS: {}, GLOO: {}}
    exact: list[bool] = []
    with processes(RANKS, _prepare, backend=OURS) as turn:
        for size in tqdm(sizes.all_reduce_bytes, "all-reduces", unit="size"):
            times, exact_on_rank = zip(*turn(size, sizes.all_reduce_rounds), strict=True)
            exact += chain.from_iterable(exact_on_rank)
            for backend, spreads in microseconds.items():
                slowest = list(map(max, *(of_rank[backend] for of_rank in times)))
                spreads[size] = Spread.of(slowest)
    ours, gloo = microseconds[OURS], microseconds[GLOO]
    ratios = {size: gloo[size].median / ours[size].median for size in ours}
    print(f"{'size':>10} {'pipekernels, us':>24} {'Gloo, us':>24} {'Gloo over ours':>16}")
    for size, ratio in ratios.items():
        print(f"{size_name(size):>10} {ours[size]!s:>24} {gloo[size]!s:>24} {ratio:>15.1f}x")
    wrong = exact.count(False)
    text = f"{wrong} of {len(exact)} all-reduces were not the exact sum (limit 0)"
    least, *_, most = sorted(ratios, key=ratios.__getitem__)
    speed_ups = [
        SpeedUp(f"all-reduce of {size_name(size)} ({name} ratio)", GLOO, ratios[size])
        for name, size in (("smallest", least), ("largest", most))
    ]
    return AllReduces(microseconds, speed_ups, [Check(text, wrong == 0)])


def size_name(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def _prepare(rank: int) -> Callable[[int, int], tuple[Times, list[bool]]]:
    """A turn calls ``all_reduce`` on tensors of so many bytes, so many rounds of both backends;
    returns times, and whether each sum was exact."""
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}

    def turn(size: int, rounds: int) -> tuple[Times, list[bool]]:
        # Whole numbers far below 2^24, so that float32 has their exact sum.
        values = torch.arange(size // 4, dtype=torch.float32).remainder_(1000)
        expected = RANKS * values + sum(range(RANKS))
        tensor = torch.empty_like(values)
        untimed, timed = (1, 5) if size >= FEW_CALLS_FROM else (5, 20)
        times: Times = {backend: [] for backend in groups}
        exact = []
        for _ in range(rounds):
            for backend, group in groups.items():
                for call in range(untimed + timed):
                    torch.add(values, rank, out=tensor)
                    dist.barrier()
                    begin = time.perf_counter()
                    dist.all_reduce(tensor, group=group)
                    microseconds = (time.perf_counter() - begin) * 1e6
                    exact.append(torch.equal(tensor, expected))
                    if call >= untimed:
                        times[backend].append(microseconds)
        return times, exact

    return turn
