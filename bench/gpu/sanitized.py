"""``python -m bench.gpu.sanitized PART ...``: all CUDA operations, small, for compute-sanitizer.

A kernel takes a thousand times as long there, so the sizes are the smallest that reach every
branch: ragged, empty, misaligned and transposed. Results are compared too, as the tool does not
check them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch

from bench.gpu.threads import ALGORITHMS, Threads, contents, expected
from bench.timing import synchronize
from pipekernels import ops
from pipekernels.ops import concat_micro_batches, split_micro_batches

TIMEOUT = 60.0
ALONE = "note: kernels run one at a time here: ranks that wait for each other are left out"
LONG = 1_000_000_000  # cycles; half a second


def check(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Print what is compared; raise AssertionError where bits differ."""
    print(name, flush=True)
    assert torch.equal(ours, theirs), name


def copies(device: torch.device) -> None:
    """Microbatches: units of every width, rows and transposed, tiles that are not full; casts."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        whole = torch.arange(131 * 67, device=device).remainder(251).to(dtype).view(131, 67)
        for view in (whole, whole.t(), whole[1:, 1:], whole[:0]):
            for dim in (0, 1):
                parts = split_micro_batches(view, 3, dim)
                for part, rows in zip(parts, view.tensor_split(len(parts), dim), strict=True):
                    name = f"split {dtype} {tuple(view.shape)} {dim}"
                    check(name, part, rows.contiguous())
                joined = concat_micro_batches(parts, dim)
                check("concat", joined, view.contiguous())
                if not view.is_floating_point():
                    continue
                for to in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                    cast = concat_micro_batches(parts, dim, dtype=to)
                    check(f"cast to {to}", cast, view.to(to).contiguous())


def side_by_side(device: torch.device) -> bool:
    """Whether kernels of two streams run at the same time; a sanitizer may prevent it."""
    if device.type == "cpu":
        return True
    long, short = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(1)  # Loads it.
    torch.cuda.synchronize(device)
    for cycles, end in ((LONG, long), (1, short)):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda._sleep(cycles)
            end.record()
    short.synchronize()
    found = not long.query()
    torch.cuda.synchronize(device)
    return found


def collectives(device: torch.device) -> None:
    """All collectives by one rank and by two, which are threads."""
    for ranks in (1, 2):
        if ranks > 1 and not side_by_side(device):
            print(ALONE, flush=True)
            return
        with contextlib.closing(Threads(ranks, device, TIMEOUT)) as threads:
            for dtype in (torch.float32, torch.bfloat16):
                for count in (0, 5, 3001):
                    all_reduce(threads, count, dtype)
                    others(threads, count, dtype)


def gemm(device: torch.device) -> None:
    """The Triton kernel on ragged sizes and odd strides, and its library on CPUs, near enough."""
    algorithm = "triton" if device.type == "cuda" else "auto"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for m, n, k in ((1, 64, 512), (37, 65, 130), (0, 8, 8), (128, 128, 64)):
            x, weight = (torch.randn(size, k, device=device, dtype=dtype) for size in (m, n))
            for a, b in ((x, weight), (x.t().contiguous().t(), weight.t().contiguous().t())):
                exact = a.double() @ b.double().t()
                result = ops.sharded_gemm(a, b, algorithm=algorithm).double()
                print(f"gemm {dtype} {m} x {n} x {k}", flush=True)
                # Rounding of the result, and of k products that are summed.
                unit = torch.finfo(dtype).eps + k * torch.finfo(torch.float32).eps
                bound = unit * (a.double().abs() @ b.double().abs().t())
                assert ((result - exact).abs() <= bound).all(), f"{dtype} {m} x {n} x {k}"


def all_reduce(threads: Threads, count: int, dtype: torch.dtype) -> None:
    """By every algorithm. Everything is allocated before any rank waits for another."""
    device, ranks = threads.device, threads.ranks
    total = expected(ranks, count, dtype, device)
    sources = [contents(rank, count, dtype, device) for rank in range(ranks)]
    tensors = [torch.empty_like(source) for source in sources]
    synchronize(device)
    for algorithm in ALGORITHMS:

        def body(rank: int, algorithm: str = algorithm) -> None:
            tensors[rank].copy_(sources[rank])
            threads.communicators[rank].all_reduce(tensors[rank], algorithm=algorithm)

        threads.run(body)
        for tensor in tensors:
            check(f"{ranks} ranks, {algorithm} {dtype} {count}", tensor, total)


def others(threads: Threads, count: int, dtype: torch.dtype) -> None:
    """The collectives beside all_reduce."""
    device, ranks = threads.device, threads.ranks
    whole = expected(ranks, ranks * count, dtype, device)
    sources = [contents(rank, ranks * count, dtype, device) for rank in range(ranks)]
    parts = [torch.empty(count, dtype=dtype, device=device) for _ in range(ranks)]
    joined, sent = ([torch.empty_like(source) for source in sources] for _ in range(2))
    sent[0].copy_(sources[0])
    synchronize(device)

    def body(rank: int) -> None:
        communicator = threads.communicators[rank]
        communicator.reduce_scatter(sources[rank], out=parts[rank])
        communicator.all_gather(parts[rank], out=joined[rank])
        communicator.broadcast(sent[rank], 0)

    threads.run(body)
    for rank in range(ranks):
        check(f"{ranks} ranks, reduce_scatter and all_gather {dtype} {count}", joined[rank], whole)
        check(f"{ranks} ranks, broadcast {dtype} {count}", sent[rank], sources[0])


PARTS: dict[str, Callable[[torch.device], None]] = {
    "copies": copies,
    "gemm": gemm,
    "collectives": collectives,
}


def main() -> None:
    """Run the parts that were asked for."""
    for part in sys.argv[1:]:
        PARTS[part](torch.device("cuda"))
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
