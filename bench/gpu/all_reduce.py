"""All-reduce of several ranks that share one GPU: how near to the memory it gets, and NCCL.

Every rank's tensor of M bytes is read and written at least once, and the tensors of all n ranks are
in the same memory: an all-reduce moves at least 2 n M bytes. The bound, ``copy``, is one from
device to device of n M bytes, which moves as many. No link between GPUs is used: this measures the
kernels, not how several GPUs would perform. Small sizes stay in the L2 cache.

* Threads: ranks of one process, each with its own stream. The time of a call on the device is from
  when its last rank may begin until its last rank is done; launches are queued ahead. Every rank
  rewrites its tensor before each call, outside the timed region. ``late`` is the number of samples
  that have the host's time in them, as it launched too slowly.
* Processes: the device time-slices them, so ranks that wait for each other wait for time slices;
  calls in a row until the device is idle, slowest rank. NCCL before 2.30.3 refuses several ranks on
  one GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.threads import ALGORITHMS, TIMEOUT, Threads, contents, expected
from bench.harness import Options, Turns
from bench.processes import Processes, Serve, join
from bench.timing import bus, call_seconds, events, sampler
from pipekernels import Communicator

RANKS = (2, 4, 8)
SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28]  # bytes
CALLS = 4  # queued together
HEAD_STARTS = (20_000_000, 80_000_000, 320_000_000)  # cycles that it waits meanwhile; 10 ms first
PROCESS_SECONDS = 30.0
NCCL_SHARES_GPUS = (2, 30, 3)
WAYS = [f"{kind} {algorithm}" for kind in ("ordinary", "symmetric") for algorithm in ALGORITHMS]
# One dtype after the other, as time may be short.
GPU = {
    **{
        f"threads, {ranks} ranks, {size} bytes, {dtype}": ("copy", *WAYS)
        for dtype in ("bfloat16", "float32")
        for ranks in RANKS
        for size in SIZES
    },
    **{
        f"processes, {ranks} ranks, {size} bytes, float32": ("NCCL", "pipekernels")
        for ranks in (2, 4)
        for size in (1 << 15, 1 << 20, 1 << 26)
    },
}
GPU_QUICK = {
    case: GPU[case] for case in GPU if "2 ranks" in case and int(case.split()[3]) < 1 << 17
}
SHARES = {"threads": 0.6}  # of the time there is
BASE = ("copy", "NCCL")
COLUMNS = ("busbw", "late", "wrong")
WIDE = "gpu."  # Results of that name have a row per case.
CONDITIONS = {
    "ranks": "all on one GPU",
    "copy": "of ranks x size bytes, which moves 2 x ranks x size, as every all-reduce must",
    "threads": "device time, tensors rewritten before each call, medians; busbw in GB/s",
    "processes": "no MPS: the GPU switches between them; calls in a row, slowest rank, medians",
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
                communicator.all_reduce(tensor, algorithm=algorithm)
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


def _part(kind: str) -> dict[str, str]:
    return {"part": f"Ranks that are {kind}"}


def by_threads(ranks: int, size: int, dtype: torch.dtype, options: Options) -> Turns:
    """All candidates, with new communicators: others may have failed."""
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(contextlib.closing(Threads(ranks, options.device)))
        calls = Calls(threads, size, dtype)
        wrong = {}
        source = torch.ones(ranks * size, dtype=torch.uint8, device=options.device)
        copy = functools.partial(torch.empty_like(source).copy_, source)
        runners: dict[str, Any] = {"copy": sampler(copy, options.device)}
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

    return Turns(runners, 1, 2 if options.quick else 3, more, close, _part("threads"))


# ---- ranks that are processes ----


def _process(rank: int, port: int, serve: Serve, ranks: int, device: str, backend: str) -> None:
    """One rank: times calls of the size that it is asked for."""
    import torch.distributed as dist

    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    on = torch.device(device)
    join(backend, rank, ranks, port)
    with contextlib.ExitStack() as stack:
        all_reduce = dist.all_reduce
        if backend == "gloo":
            communicator = Communicator.from_process_group(timeout=TIMEOUT)
            all_reduce = stack.enter_context(communicator).all_reduce

        def turn(size: int) -> float:
            source = contents(rank, size // 4, torch.float32, on)
            tensor = source.clone()
            all_reduce(tensor)
            if not torch.equal(tensor, expected(ranks, size // 4, torch.float32, on)):
                raise AssertionError(f"a wrong sum of {size} bytes")
            return call_seconds(lambda: all_reduce(tensor), on, 5)

        serve(turn)


@functools.cache
def processes(name: str, ranks: int, device: str) -> Processes:
    """Ranks for calls of all sizes, until the end of this process."""
    backend = {"pipekernels": "gloo", "NCCL": "nccl"}[name]
    found = Processes(ranks, _process, ranks, device, backend)
    found.limit = PROCESS_SECONDS
    return found


def nccl() -> tuple[int, ...] | None:
    """The version of NCCL that torch uses, if it has any."""
    try:
        return tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None


def shares_gpus(device: torch.device) -> bool:
    """Whether NCCL takes several ranks on one GPU."""
    version = nccl() if device.type == "cuda" else None
    return version is not None and version >= NCCL_SHARES_GPUS


def before(options: Options) -> list[dict[str, Any]]:
    """What is left out."""
    if shares_gpus(options.device):
        return []
    least, version = (".".join(map(str, each)) for each in (NCCL_SHARES_GPUS, nccl() or ("?",)))
    return [{"note": f"NCCL {version} is left out: it shares a GPU among ranks from {least} on."}]


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Ranks of a kind, for one size."""
    kind, ranks, size, dtype = (part.split()[0] for part in case.split(", "))
    if kind == "threads":
        return by_threads(int(ranks), int(size), getattr(torch, dtype), options)
    runners = {
        name: functools.partial(processes(name, int(ranks), str(options.device)), int(size))
        for name in names
        if name == "pipekernels" or shares_gpus(options.device)
    }
    return Turns(runners, 1, 5, fields=_part("processes"))
