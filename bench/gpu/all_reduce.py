"""All-reduce of several ranks that share one GPU: how near to the memory it gets.

Every rank's tensor of M bytes is read and written at least once, and the tensors of all n ranks are
in the same memory: an all-reduce moves at least 2 n M bytes. The bound, ``copy``, is one from
device to device of n M bytes, which moves as many; ``empty`` is a kernel of each rank that does
nothing. No link between GPUs is used: this measures the kernels. Small sizes stay in the L2 cache.

Ranks are threads of one process, each with its own stream. The time of a call on the device is from
when its last rank may begin until its last rank is done; launches are queued ahead. Every rank
rewrites its tensor before each call, outside the timed region. ``late`` is the number of samples
that have the host's time in them, as it launched too slowly.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.threads import ALGORITHMS, Threads, contents, expected
from bench.harness import Options, Turns
from bench.timing import bus, events, sampler

RANKS = (2, 4, 8)
SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28]  # bytes
CALLS = 4  # queued together
HEAD_STARTS = (20_000_000, 80_000_000, 320_000_000)  # cycles that it waits meanwhile; 10 ms first
WAYS = [f"{kind} {algorithm}" for kind in ("ordinary", "symmetric") for algorithm in ALGORITHMS]
# One dtype after the other, as time may be short.
GPU = {
    f"threads, {ranks} ranks, {size} bytes, {dtype}": ("copy", "empty", *WAYS)
    for dtype in ("bfloat16", "float32")
    for ranks in RANKS
    for size in SIZES
}
GPU_QUICK = {
    case: GPU[case] for case in GPU if "2 ranks" in case and int(case.split()[3]) < 1 << 17
}
BASE = "copy"
CONDITIONS = {
    "ranks": "threads, all on one GPU",
    "copy": "of ranks x size bytes, which moves 2 x ranks x size, as every all-reduce must",
    "timing": "device time, tensors rewritten before each call, medians; busbw in GB/s",
}


class Calls:
    """All-reduces of one size and dtype by the ranks of a process."""

    def __init__(self, threads: Threads, size: int, dtype: torch.dtype) -> None:
        self._threads = threads
        device, ranks = threads.device, threads.ranks
        self._count = size // dtype.itemsize
        self._sources = [contents(rank, self._count, dtype, device) for rank in range(ranks)]
        self._expected = expected(ranks, self._count, dtype, device)
        ordinary = [torch.empty_like(source) for source in self._sources]
        symmetric = threads.symmetric((self._count,), dtype)
        self.tensors = {"ordinary": ordinary, "symmetric": symmetric}
        self.late = 0  # number of samples whose calls could not be queued in the longest wait

    def seconds(self, kind: str, algorithm: str, calls: int = CALLS) -> list[float]:
        """Seconds of each call, from when the last rank may begin until the last one is done."""
        for cycles in HEAD_STARTS:
            seconds, queued_in_time = self._queue(self.tensors[kind], algorithm, calls, cycles)
            if queued_in_time:
                return seconds
        self.late += 1
        return seconds

    def _queue(
        self, tensors: list[Tensor], algorithm: str, calls: int, cycles: int
    ) -> tuple[list[float], bool]:
        """Seconds of each call, and whether all were queued while the device waited."""
        threads = self._threads
        device, on_gpu = threads.device, threads.device.type == "cuda"
        start = events(device, 1)[0]
        ready, begin, end = (
            [events(device, calls) for _ in range(threads.ranks)] for _ in range(3)
        )
        if on_gpu:
            torch.cuda._sleep(cycles)
        start.record()
        for stream in threads.streams:
            if stream is not None:
                stream.wait_event(start)

        def body(rank: int) -> bool:
            stream = threads.streams[rank]
            communicator, tensor = threads.communicators[rank], tensors[rank]
            for call in range(calls):
                tensor.copy_(self._sources[rank])
                ready[rank][call].record()
                threads.meet()
                if stream is not None:
                    for peer in range(threads.ranks):
                        stream.wait_event(ready[peer][call])
                begin[rank][call].record()
                if algorithm != "empty":
                    communicator.all_reduce(tensor, algorithm=algorithm)
                elif on_gpu:
                    torch.cuda._sleep(1)
                end[rank][call].record()
            return not on_gpu or not start.query()

        queued_in_time = all(threads.run(body))

        def last(marks: list[list[Any]], call: int) -> float:
            return max(start.elapsed_time(mark[call]) for mark in marks)

        seconds = [(last(end, call) - last(begin, call)) * 1e-3 for call in range(calls)]
        return seconds, queued_in_time

    def wrong(self, kind: str) -> int:
        """The number of wrong elements on all ranks, after a call."""
        return sum(int((tensor != self._expected).sum()) for tensor in self.tensors[kind])


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """All candidates, with new communicators: others may have failed."""
    _, *sizes, dtype = (part.split()[0] for part in case.split(", "))
    ranks, size = map(int, sizes)
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(contextlib.closing(Threads(ranks, options.device)))
        calls = Calls(threads, size, getattr(torch, dtype))
        wrong = {}
        source = torch.ones(ranks * size, dtype=torch.uint8, device=options.device)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        runners: dict[str, Any] = {"copy": sampler(copy, options.device)}
        runners["empty"] = functools.partial(calls.seconds, "ordinary", "empty")
        for way in WAYS:
            kind, algorithm = way.split()
            calls.seconds(kind, algorithm, 1)
            wrong[way] = calls.wrong(kind)
            runners[way] = functools.partial(calls.seconds, kind, algorithm)
        close = stack.pop_all().close

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        rate = size * bus("all_reduce", ranks) / 1e9
        found: dict[str, dict[str, Any]] = {
            way: {"busbw": rate / medians[way], "wrong": wrong[way]} for way in WAYS
        }
        if calls.late:
            found["copy"] = {"late": calls.late}
        return found

    part = {"part": "Ranks that are threads"}
    return Turns(runners, 1, 2 if options.quick else 3, more, close, part)
