"""``python -m bench.gpu.smoke CASE [--device cpu]``: whether one of the main things works at all.

`make gpu-check` runs each case as a separate process. Values are small integers, so that results
are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.gpu.sanitized import all_reduce, check, others
from bench.gpu.steps import SKIPPED
from bench.gpu.threads import Threads, contents, expected
from pipekernels import Communicator, ops
from pipekernels.kernels.config import KINDS
from pipekernels.ops import concat_micro_batches, split_micro_batches

SECONDS = 20.0  # for ranks that are processes
TIMEOUT = 15.0  # of communicators,
HASTY = 3.0  # and of the one whose rank never comes
RANKS = 2
COUNT = 70_001

Body = Callable[[Communicator, torch.device, str], None]


class Skip(Exception):
    """The case cannot run on this device."""


def copy(device: torch.device) -> None:
    """To the device and back, and micro-batches of a tensor."""
    source = torch.arange(1 << 20)
    check("there and back", ops.p2p_copy(ops.p2p_copy(source, device), "cpu"), source)
    x = torch.arange(67 * 5 * 3, device=device).view(67, 5, 3)
    parts = split_micro_batches(x, 3, 1)
    check("concatenated", concat_micro_batches(parts, 1), x)  # type: ignore[arg-type]


def product(kind: str, device: torch.device) -> None:
    """By the Triton kernel on a GPU, against float64."""
    if kind == "float8_e4m3fn" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise Skip(f"a GPU of compute capability {capability} has no float8")
    torch.backends.cuda.matmul.allow_tf32 = kind == "tfloat32"
    dtype = torch.float32 if kind == "tfloat32" else getattr(torch, kind)

    def operand(rows: int, step: int) -> torch.Tensor:
        numbers = torch.arange(rows * 512, device=device).view(rows, 512)
        return (numbers * step % 11 % 5 - 2).to(dtype)

    a, b = operand(200, 7), operand(256, 3)
    result = ops.sharded_gemm(a, b, algorithm="triton" if device.type == "cuda" else "auto")
    check(kind, result, (a.double() @ b.double().t()).to(result.dtype))


def on_threads(ranks: int, device: torch.device) -> None:
    """All collectives, all-reduce by every algorithm."""
    with contextlib.closing(Threads(ranks, device, TIMEOUT)) as threads:
        for dtype in (torch.float32, torch.bfloat16):
            all_reduce(threads, COUNT, dtype)
            others(threads, COUNT, dtype)


def on_processes(body: Body, device: torch.device) -> None:
    """``body`` on ranks that are processes, all on ``device``.

    Raises:
        RuntimeError: a rank failed, and has printed why, or did not end.
    """
    context = multiprocessing.get_context("fork")  # CUDA is not initialised yet.
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, body, device))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + SECONDS
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
    if any(statuses) or None in statuses:
        raise RuntimeError(f"exit statuses of the ranks: {statuses}")


def rank_main(rank: int, folder: str, body: Body, device: torch.device) -> None:
    """One rank of :func:`on_processes`."""
    torch.set_num_threads(1)
    with joined(rank, f"{folder}/first", TIMEOUT) as communicator:
        body(communicator, device, folder)


def joined(rank: int, path: str, timeout: float) -> Communicator:
    """This rank's end of a communicator that meets through a file."""
    return Communicator.from_store(dist.FileStore(path, RANKS), rank, RANKS, timeout=timeout)


def reduce(communicator: Communicator, device: torch.device, folder: str) -> None:
    """By every algorithm, on an ordinary and on a symmetric tensor."""
    source = contents(communicator.rank, COUNT, torch.float32, device)
    total = expected(RANKS, COUNT, torch.float32, device)
    on = device if device.type == "cuda" else None
    for tensor in (torch.empty_like(source), communicator.empty(COUNT, device=on)):
        for algorithm in ("auto", "one_shot", "two_shot", "ring"):
            communicator.all_reduce(tensor.copy_(source), algorithm=algorithm)
            communicator.synchronize()
            check(algorithm, tensor, total)


def replay(communicator: Communicator, device: torch.device, folder: str) -> None:
    """A graph of an all-reduce and its neighbours, replayed on other contents."""
    x = torch.zeros(COUNT, device=device)

    def step() -> torch.Tensor:
        return communicator.all_reduce(x.mul(2)).add(1)

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        step()  # Sets up the communicator, and loads the kernels.
        communicator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            result = step()
        for value in (1, 2, 3):
            x.copy_(contents(communicator.rank + value, COUNT, x.dtype, device))
            graph.replay()
            stream.synchronize()
            communicator.synchronize()
            total = sum(contents(rank + value, COUNT, x.dtype, device) for rank in range(RANKS))
            check(f"replay {value}", result, 2 * total + 1)


def miss(communicator: Communicator, device: torch.device, folder: str) -> None:
    """Rank 1 never comes to the second all-reduce: rank 0 is told, and its device stays usable."""
    x = torch.ones(COUNT, device=device)
    communicator.all_reduce(x)  # Starts CUDA on all ranks, which may take longer than ``HASTY``.
    communicator.synchronize()
    with joined(communicator.rank, f"{folder}/second", HASTY) as hasty:
        hasty.all_reduce(x)
        hasty.synchronize()
        if hasty.rank == 0:
            try:
                hasty.all_reduce(x)
                hasty.synchronize()
            except TimeoutError as error:
                print(error, flush=True)
                assert re.search(r"rank(\(s\))? 1 of 2 did not arrive", str(error)), str(error)
            else:
                raise AssertionError("an all-reduce without rank 1 raised no TimeoutError")
        communicator.barrier()
    check("afterwards", communicator.all_reduce(x.fill_(1)), torch.full_like(x, RANKS))


def capture(device: torch.device) -> None:
    """On two processes."""
    if device.type != "cuda":
        raise Skip("a CPU has no CUDA graphs")
    on_processes(replay, device)


CASES: dict[str, Callable[[torch.device], None]] = {
    "copy": copy,
    "all-reduce, 1 thread": functools.partial(on_threads, 1),
    "all-reduce, 2 threads": functools.partial(on_threads, 2),
    "all-reduce, 2 processes": functools.partial(on_processes, reduce),
    **{f"product, {kind}": functools.partial(product, kind) for kind in KINDS},
    "capture and replay": capture,
    "a rank that never comes": functools.partial(on_processes, miss),
}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.smoke", description=__doc__)
    parser.add_argument("case", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--device", default="cuda", type=torch.device)
    args = parser.parse_args()
    try:
        CASES[args.case](args.device)
    except Skip as reason:
        print(reason)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
