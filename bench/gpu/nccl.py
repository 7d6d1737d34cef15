"""Against NCCL, on 2 to 8 GPUs: collectives, and pipes over real devices.

On every rank that torchrun starts; on CPUs Gloo stands in NCCL's place. Candidates take turns on
the same tensors, and a time is that of calls in a row, on the slowest rank. Every element of every
rank's result is compared, before and after.

* Collectives have the columns of nccl-tests; in place and out of place only where ours have both.
* The pipe is over all GPUs in rank 0; ``.to`` hands each microbatch on by
  ``x.to(device, non_blocking=True)``. Both must give the same bits.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.gpu.ranks import OURS, WARMUP, Buffers, Ranks
from bench.harness import Options, Turns
from bench.processes import repeated
from bench.timing import bus, synchronize
from pipekernels import Communicator, Pipe, _backend

BY_HAND = ".to"
BASE = ("NCCL", "Gloo", BY_HAND)
COLUMNS = ("size", "count", "redop", "algbw", "busbw", "wrong")
CONDITIONS = {
    "collectives": "calls in a row on all ranks, the slowest rank's time per call; "
    "candidates in turn on the same tensors, medians; GB/s",
    "pipe": "forward and backward until all devices are idle, candidates in turn, medians",
    "wrong": "elements of all ranks' results, before and after",
}
TIMEOUT = 60.0  # seconds of our collectives
LIMIT = timedelta(minutes=5)  # of the others: ranks wait while rank 0 measures a pipe
MOST_GPUS, CPU_RANKS = 8, 2
PLACES = {
    "all_reduce": ("in",), "reduce_scatter": ("out",), "all_gather": ("out", "in"),
    "broadcast": ("in",),
}  # fmt: skip
SIZES = [2**exponent for exponent in range(10, 29, 2)]  # bytes
CHUNKS, LAYERS = 8, 4  # of a pipe, and of each of its stages
WIDTH, TINY_WIDTH = 4096, 16


def cases(
    sizes: Sequence[int], dtypes: Sequence[str], rows: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """All of them; rows are those of a microbatch."""
    found = [
        f"{operation}, {tensor} tensors, {place} place, {size} bytes, {dtype}"
        for operation, places in PLACES.items()
        for tensor in ("ordinary", "symmetric")
        for place in places
        for dtype in dtypes
        for size in sizes
    ]
    return dict.fromkeys(found, BASE) | {f"pipe, {count} rows": (BY_HAND, OURS) for count in rows}


GPU = cases(SIZES, ("bfloat16", "float32"), (16, 256, 2048))
GPU_QUICK = cases((1 << 10, 1 << 16), ("bfloat16",), (2,))


@functools.cache
def joined(device_type: str) -> Ranks:
    """This rank, which joins the others by the environment that torchrun sets.

    Raises:
        SystemExit: there are fewer GPUs than ranks.
    """
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        device, peer = torch.device("cpu"), "Gloo"
    else:
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        if local >= gpus:
            raise SystemExit(f"there is no GPU for rank {local}: start at most {gpus} ranks")
        device, peer = torch.device("cuda", local), "NCCL"
        _backend.require_cuda(device)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=LIMIT, device_id=device)
        CONDITIONS["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    control = dist.new_group(backend="gloo", timeout=LIMIT)
    communicator = Communicator.from_process_group(control, timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, peer, communicator, control)


def world(device: torch.device) -> int:
    """How many ranks to start.

    Raises:
        SystemExit: there are too few GPUs.
    """
    if device.type == "cpu":
        return CPU_RANKS
    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(
            f"bench-nccl compares over 2 to {MOST_GPUS} GPUs, and torch {torch.__version__} sees "
            f"{count}. `make gpu-check` measures on one GPU; `python -m bench nccl --device "
            "cpu --quick` shows on a CPU that this runs, with Gloo in NCCL's place."
        )
    return min(count, MOST_GPUS)


def agreed(rows: list[dict[str, Any]], options: Options) -> list[dict[str, Any]]:
    """The rows of a case on all ranks: an error if any failed, which later cases survive."""
    ranks = joined(options.device.type)
    failed = ranks.sum(any("error" in row for row in rows))
    if not failed:
        return rows
    ranks.communicator.close()  # A failure ends it.
    ranks.communicator = Communicator.from_process_group(ranks.control, timeout=TIMEOUT)
    error = f"RuntimeError: {failed} other ranks failed"
    return [row for row in rows if "error" in row] or [{"case": "another rank", "error": error}]


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The calls of a case, with their errors."""
    ranks, quick = joined(options.device.type), options.quick
    kind, *details = case.split(", ")
    if kind == "pipe":
        return of_pipe(int(details[0].split()[0]), ranks, quick)
    tensor, place, size, dtype = details
    symmetric, in_place = tensor.startswith("symmetric"), place.startswith("in")
    buffers = Buffers(kind, int(size.split()[0]), getattr(torch, dtype), ranks, symmetric, in_place)
    calls = buffers.calls()
    fields = {
        "part": f"{kind}; {ranks.ranks} ranks",
        "size": buffers.whole.nbytes,
        "count": buffers.part if buffers.shared else buffers.count,
        "redop": "sum" if "reduce" in kind else "none",
    }
    before = {name: buffers.wrong(call) for name, call in calls.items()}

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        rows = {}
        for name, seconds in medians.items():
            rate = buffers.whole.nbytes / seconds / 1e9
            wrong = before[name] + buffers.wrong(calls[name])
            busbw = rate * bus(kind, ranks.ranks)
            rows[name] = {"algbw": rate, "busbw": busbw, "wrong": wrong}
        return rows

    runners = {name: ranks.turn(call) for name, call in calls.items()}
    return Turns(runners, 1, 2 if quick else 9, more, fields=fields)


def by_hand(stages: Sequence[nn.Module], devices: list[torch.device], x: Tensor) -> Tensor:
    """The model's result, on the last device."""
    results = []
    for part in x.chunk(CHUNKS):
        for module, device in zip(stages, devices, strict=True):
            part = module(part.to(device, non_blocking=True))
        results.append(part)
    return torch.cat(results)


def of_pipe(rows: int, ranks: Ranks, quick: bool) -> Turns:
    """In rank 0, over all GPUs; the others wait. Size is that of what a microbatch hands on."""
    if ranks.rank != 0:
        return Turns({}, 0, 0)
    devices, width = [torch.device("cpu")] * 2, TINY_WIDTH if quick else WIDTH
    if ranks.device.type == "cuda":
        gpus = min(torch.cuda.device_count(), MOST_GPUS)
        devices = [torch.device("cuda", i) for i in range(gpus)]
    torch.manual_seed(0)
    stages = nn.ModuleList(
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))
        .to(device, torch.bfloat16)
        for device in devices
    )  # fmt: skip
    layers = nn.Sequential(
        *(layer for stage in copy.deepcopy(stages) for layer in stage.children())
    )
    pipe = Pipe(layers, [LAYERS] * len(devices), devices=devices, chunks=CHUNKS, checkpoint="never")
    x = torch.randn(rows * CHUNKS, width, device=devices[0]).to(torch.bfloat16)

    def step(forward: Callable[[], Tensor], modules: nn.Module) -> Tensor:
        modules.zero_grad()
        output = forward()
        output.float().square().mean().backward()
        for device in devices:
            synchronize(device)
        return output.detach()

    steps: dict[str, Callable[[], Tensor]] = {
        BY_HAND: lambda: step(lambda: by_hand([*stages], devices, x), stages),
        OURS: lambda: step(lambda: pipe(x), pipe),
    }

    def wrong() -> int:
        return int((steps[OURS]() != steps[BY_HAND]()).sum())

    before = wrong()
    fields = {
        "part": f"Pipe of {len(devices)} stages; size of what a microbatch hands on",
        "size": 2 * rows * width,
        "count": rows * width,
        "redop": "none",
    }
    runners = {name: repeated(step, 1, WARMUP) for name, step in steps.items()}
    more = lambda medians: {OURS: {"wrong": before + wrong()}}
    return Turns(runners, 1, 2 if quick else 9, more, fields=fields)
