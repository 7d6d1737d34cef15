"""All-reduce of several ranks that share one GPU: how near to the memory it gets, and NCCL.

Every rank's tensor of M bytes is read and written at least once, and the tensors of all n ranks are
in the same memory: an all-reduce moves at least 2 n M bytes. The bound is a device-to-device copy
of n M bytes, which moves as many. No link between GPUs is used: this measures the kernels, not how
several GPUs would perform. Small sizes stay in the L2 cache, in the bound's copy too.

* Threads: ranks of one process, each with its own stream. The time of a call on the device is from
  when its last rank may begin until its last rank is done; launches are queued ahead. Every rank
  rewrites its tensor before each call, outside the timed region.
* Processes: the device time-slices them, so ranks that wait for each other wait for time slices;
  calls in a row until the device is idle, slowest rank. NCCL before 2.30.3 refuses several ranks on
  one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import harness
from bench.gpu.environment import nccl
from bench.gpu.timing import Row, attempt, call_seconds, compare, errors, events
from bench.report.tables import markdown, microseconds, svg
from pipekernels import Communicator, PeerError

RANKS = (2, 4, 8)
SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28]  # bytes
DTYPES = (torch.bfloat16, torch.float32)
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
CALLS = 4  # queued together
HEAD_STARTS = (20_000_000, 80_000_000, 320_000_000)  # cycles that it waits meanwhile; 10 ms first
PROCESS_RANKS = (2, 4)
PROCESS_SIZES = [1 << 15, 1 << 20, 1 << 26]
PROCESS_SECONDS = 30.0
NCCL_SHARES_GPUS = (2, 30, 3)
TIMEOUT = 10.0
THREADS = 0.6  # of the time there is, for ranks that are threads
PERIOD = 1 << 12  # elements, after which contents repeat
CONDITIONS = {
    "ranks": "all on one GPU",
    "bound": "a copy of ranks x size bytes, which moves 2 x ranks x size, as every all-reduce must",
    "threads": "device time, tensors rewritten before each call, medians",
    "processes": "no MPS: the GPU switches between them; calls in a row, slowest rank, medians",
}


def contents(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small integers: any order of summation gives the same bits in every dtype."""
    pattern = (torch.arange(PERIOD, device=device) * 7 + rank * 5) % 16 + 1
    return pattern.to(dtype).repeat(-(-count // PERIOD))[:count].clone()


def expected(ranks: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum of all ranks' contents."""
    total = torch.zeros(count, dtype=dtype, device=device)
    for rank in range(ranks):
        total += contents(rank, count, dtype, device)
    return total


# ---- ranks that are threads ----


class Threads:
    """Ranks on threads of this process, each with a stream of its own."""

    def __init__(self, ranks: int, device: torch.device, timeout: float = TIMEOUT) -> None:
        self.ranks = ranks
        self.device = device
        self.communicators = Communicator.threads(ranks, timeout=timeout)
        self._pool = ThreadPoolExecutor(ranks)
        self._together = threading.Barrier(ranks, timeout=timeout)
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) if cuda else None for _ in range(ranks)]

    def close(self) -> None:
        """End the threads, and close the communicators."""
        for communicator in self.communicators:
            communicator.close()
        self._pool.shutdown()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(rank)`` on all ranks at once, in their streams; waits for all ranks and the
        device, and raises their errors."""

        def on_rank(rank: int) -> Any:
            try:
                with torch.cuda.stream(self.streams[rank]):
                    result = body(rank)
                if self.device.type == "cuda":
                    self.communicators[rank].synchronize()
                return result
            except BaseException:
                self._together.abort()
                raise

        futures = [self._pool.submit(on_rank, rank) for rank in range(self.ranks)]
        found = [future.exception() for future in futures]
        # Prefer the original error to errors that it caused on other ranks.
        for consequences in ((threading.BrokenBarrierError, PeerError), ()):
            for error in found:
                if error is not None and not isinstance(error, consequences):
                    raise error
        results = [future.result() for future in futures]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return results

    def symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """A symmetric tensor of zeros of every rank."""
        on = {"device": self.device} if self.device.type == "cuda" else {}
        return self.run(
            lambda rank: self.communicators[rank].empty(shape, dtype=dtype, **on).zero_()
        )

    def meet(self) -> None:
        """Wait on the host until all ranks have called it."""
        self._together.wait()


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


def by_threads(ranks: int, size: int, dtype: torch.dtype, args: argparse.Namespace) -> Row:
    """All candidates for one size, in turn; with new communicators: others may have failed."""
    rounds = 2 if args.quick else 3
    with contextlib.closing(Threads(ranks, args.device)) as threads:
        calls = Calls(threads, size, dtype)
        wrong = {}
        turns = {}
        for kind in calls.tensors:
            for algorithm in ALGORITHMS:
                name = f"{kind} {algorithm}"
                calls.seconds(kind, algorithm, 1)
                wrong[name] = calls.wrong(kind)
                turns[name] = functools.partial(calls.seconds, kind, algorithm)
        samples = harness.alternate(turns, warmup=1, rounds=rounds)
    return {
        "late": calls.late,
        "bound": streaming(ranks * size, args.device, 5),
        "candidates": {
            name: {**harness.summary(times), "wrong": wrong[name]}
            for name, times in samples.items()
        },
    }


def streaming(size: int, device: torch.device, rounds: int) -> float:
    """Seconds of a copy of ``size`` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return compare({"copy": lambda: copy.copy_(source)}, device, rounds=rounds)["copy"]["median"]


# ---- ranks that are processes ----


def process(
    rank: int, ranks: int, folder: str, device: str, sizes: list[int], backend: str, answers: Any
) -> None:
    """One rank: times its calls and puts them into ``answers``."""
    try:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        torch.set_num_threads(1)
        on = torch.device(device)
        store = f"file://{folder}/{backend}"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        communicator = None
        if backend == "gloo":
            communicator = Communicator.from_process_group(timeout=TIMEOUT)
        rows = []
        for size in sizes:
            source = contents(rank, size // 4, torch.float32, on)
            total = expected(ranks, size // 4, torch.float32, on)
            tensor = torch.empty_like(source)

            def call(tensor: Tensor = tensor) -> None:
                if communicator is None:
                    dist.all_reduce(tensor)
                else:
                    communicator.all_reduce(tensor)

            tensor.copy_(source)
            call()
            wrong = int((tensor != total).sum())
            seconds = [call_seconds(call, on, 5) for _ in range(5)]
            rows.append({"size": size, "seconds": seconds, "wrong": wrong})
        answers.put((rank, rows, None))
        if communicator is not None:
            communicator.close()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - told to the parent
        answers.put((rank, None, traceback.format_exc()))


def by_processes(ranks: int, args: argparse.Namespace, backend: str) -> Row:
    """Run all ranks and combine their results.

    Raises:
        RuntimeError: a rank failed or did not answer.
    """
    sizes = PROCESS_SIZES[:1] if args.quick else PROCESS_SIZES
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=process,
                args=(rank, ranks, folder, str(args.device), sizes, backend, answers),
            )
            for rank in range(ranks)
        ]
        for started in processes:
            started.start()
        try:
            deadline = time.monotonic() + PROCESS_SECONDS
            while len(found) < ranks:
                rank, rows, error = answers.get(timeout=max(0.1, deadline - time.monotonic()))
                if error is not None:
                    raise RuntimeError(f"rank {rank}: {error}")
                found[rank] = rows
            for started in processes:
                started.join(5.0)
        except queue.Empty:
            missing = sorted(set(range(ranks)) - set(found))
            raise RuntimeError(f"ranks {missing} did not answer in {PROCESS_SECONDS} s") from None
        finally:
            for started in processes:
                started.kill()
                started.join()
    summaries = {}
    for index, size in enumerate(sizes):
        rows = [found[rank][index] for rank in range(ranks)]
        slowest = [max(times) for times in zip(*(row["seconds"] for row in rows), strict=True)]
        wrong = sum(row["wrong"] for row in rows)
        summaries[str(size)] = {**harness.summary(slowest), "wrong": wrong}
    return {"sizes": summaries}


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of thread ranks, one dtype after the other as time may be short; then process ranks."""
    begin = time.monotonic()
    left_out = 0
    for dtype in DTYPES[:1] if args.quick else DTYPES:
        for ranks in RANKS[:1] if args.quick else RANKS:
            for size in SIZES[:2] if args.quick else SIZES:
                if time.monotonic() - begin > THREADS * args.seconds:
                    left_out += 1
                    continue
                yield from attempt(
                    {"part": "threads", "ranks": ranks, "size": size, "type": str(dtype)[6:]},
                    functools.partial(by_threads, ranks, size, dtype, args),
                )
    if left_out:
        yield {"part": "left out", "cases": left_out}
    version = nccl() if args.device.type == "cuda" else None
    for ranks in PROCESS_RANKS[:1] if args.quick else PROCESS_RANKS:
        yield from attempt(
            {"part": "processes", "ranks": ranks, "system": "pipekernels"},
            functools.partial(by_processes, ranks, args, "gloo"),
        )
        if version is not None and version >= NCCL_SHARES_GPUS:
            yield from attempt(
                {"part": "processes", "ranks": ranks, "system": f"NCCL {_dotted(version)}"},
                functools.partial(by_processes, ranks, args, "nccl"),
            )
    if version is not None and version < NCCL_SHARES_GPUS:
        yield {"part": "left out", "system": f"NCCL {_dotted(version)}"}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def table(rows: list[Row]) -> str:
    """Thread ranks against the bound; process ranks; what was left out, and why."""
    header = ["ranks", "size (B)", "type", "redop", "tensor", "time", "algbw", "busbw", "#wrong"]
    header += ["of bound", *ALGORITHMS[1:]]
    lines = []
    for row in rows:
        for kind in ("ordinary", "symmetric") if "candidates" in row else ():
            found = {name: row["candidates"][f"{kind} {name}"] for name in ALGORITHMS}
            best = found["auto"]
            bandwidth = row["size"] / best["median"] / 1e9
            wrong = sum(figures["wrong"] for figures in found.values())
            lines.append(
                [
                    *(str(row[key]) for key in ("ranks", "size", "type")),
                    *("sum", kind, microseconds(best), f"{bandwidth:.2f}"),
                    *(f"{bandwidth * 2 * (row['ranks'] - 1) / row['ranks']:.2f}", str(wrong)),
                    f"{row['bound'] / best['median']:.0%}",
                    *(microseconds(found[name]) for name in ALGORITHMS[1:]),
                ]
            )
    processes = [
        [row["system"], str(row["ranks"]), size, microseconds(figures), str(figures["wrong"])]
        for row in rows
        for size, figures in row.get("sizes", {}).items()
    ]
    parts = [
        f"**Ranks that are threads, one GPU; us and GB/s**\n\n{markdown(header, lines)}",
        "**Ranks that are processes, one GPU, float32; us**\n\n"
        + markdown(["system", "ranks", "size (B)", "time", "#wrong"], processes),
    ]
    late = [row for row in rows if row.get("late")]
    if late:
        cases = ", ".join(f"{row['ranks']} x {row['size']} {row['type']}" for row in late)
        parts.append(
            f"Some samples have the host's time in them, as it launched too slowly: {cases}."
        )
    parts += [
        f"{row['cases']} cases of ranks that are threads are left out: there was no time for them."
        if "cases" in row
        else f"{row['system']} is left out: it takes several ranks on one GPU from "
        f"{_dotted(NCCL_SHARES_GPUS)} on."
        for row in rows
        if row["part"] == "left out"
    ]
    return "\n\n".join(parts) + errors(rows, "part", "system", "ranks", "size", "type")


def plot(rows: list[Row], path: Path) -> None:
    """Share of the bound over size, an axis per number of ranks, as an SVG file."""
    with svg(path, len(RANKS)) as axes:
        for axis, ranks in zip(axes, RANKS, strict=True):
            found = [r for r in rows if r.get("ranks") == ranks and "candidates" in r]
            for index, dtype in enumerate(sorted({row["type"] for row in found})):
                chosen = [row for row in found if row["type"] == dtype]
                for kind, style in (("symmetric", "-"), ("ordinary", "--")):
                    shares = [
                        row["bound"] / row["candidates"][f"{kind} auto"]["median"] for row in chosen
                    ]
                    sizes = [row["size"] for row in chosen]
                    label = f"{kind}, {dtype}"
                    axis.plot(sizes, shares, style, marker=".", color=f"C{index}", label=label)
            axis.set(title=f"{ranks} ranks, one GPU", xlabel="bytes", ylabel="of the memory bound")
            axis.set_xscale("log", base=2)
            if found:
                axis.legend()
