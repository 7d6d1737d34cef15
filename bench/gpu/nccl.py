"""Against NCCL, on 2 to 8 GPUs: collectives, the row-parallel layer, pipes over real devices.

On every rank that torchrun starts; on CPUs Gloo stands in NCCL's place. Candidates take turns on
the same tensors, and a time is that of calls in a row, on the slowest rank. Every element of every
rank's result is compared, before and after.

* Collectives have the columns of nccl-tests; in place and out of place only where ours have both.
* The layer is that of Llama-70B's MLP: cuBLAS, then the sum. It is checked with zeros and ones, so
  few that sums are exact in bfloat16, and timed with random numbers.
* The pipe is over all GPUs in rank 0; ``.to`` hands each micro-batch on by
  ``x.to(device, non_blocking=True)``. Both must give the same bits.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from bench.gpu.ranks import OURS, WARMUP, Buffers, Calls, Ranks
from bench.harness import Options, Turns
from bench.processes import repeated
from bench.timing import bus, synchronize
from pipekernels import Communicator, Pipe, _backend
from pipekernels.tensor_parallel.functional import row_linear

BY_HAND = ".to"
BASE = ("NCCL", "Gloo", BY_HAND)
COLUMNS = ("size", "count", "redop", "algbw", "busbw", "wrong")
CONDITIONS = {
    "collectives and layer": "calls in a row on all ranks, the slowest rank's time per call; "
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
FEATURES, TINY_FEATURES = (8192, 28672), (64, 128)  # hidden and inner ones of the layer
MOST_ONES = 200  # in a row of all ranks' inputs: bfloat16 holds integers up to 256
CHUNKS, LAYERS = 8, 4  # of a pipe, and of each of its stages
WIDTH, TINY_WIDTH = 4096, 16


def cases(
    sizes: Sequence[int], dtypes: Sequence[str], tokens: Sequence[int], rows: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """All of them; rows are those of a micro-batch."""
    found = [
        f"{operation}, {tensor} tensors, {place} place, {size} bytes, {dtype}"
        for operation, places in PLACES.items()
        for tensor in ("ordinary", "symmetric")
        for place in places
        for dtype in dtypes
        for size in sizes
    ]
    found += [f"row-parallel layer, {count} rows" for count in tokens]
    return dict.fromkeys(found, BASE) | {f"pipe, {count} rows": (BY_HAND, OURS) for count in rows}


GPU = cases(SIZES, ("bfloat16", "float32"), (1, 16, 256, 1024, 4096), (16, 256, 2048))
GPU_QUICK = cases((1 << 10, 1 << 16), ("bfloat16",), (3,), (2,))


@functools.cache
def joined(device_type: str) -> Ranks:
    """This rank, which joins the others by the environment that torchrun sets.

    Raises:
        SystemExit: there are fewer GPUs than ranks, or no build for this one.
    """
    missing = False
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
        missing = bool(pairs_without_access())
    control = dist.new_group(backend="gloo", timeout=LIMIT)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device, peer, None, control)
    if not missing:
        ranks.communicator = Communicator.from_process_group(control, timeout=TIMEOUT)
    return ranks


def pairs_without_access() -> list[str]:
    """The pairs of GPUs of which one cannot read the other's memory."""
    count = min(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    can = torch.cuda.can_device_access_peer
    return [
        f"{i} and {j}"
        for i in range(count)
        for j in range(i + 1, count)
        if not (can(i, j) and can(j, i))
    ]


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
            f"{count}. `make gpu-check` measures on one GPU; `python -m bench.gpu nccl --device "
            "cpu --quick` shows on a CPU that this runs, with Gloo in NCCL's place."
        )
    return min(count, MOST_GPUS)


def before(options: Options) -> list[dict[str, Any]]:
    """Versions, and what is not measured."""
    ranks = joined(options.device.type)
    if ranks.peer == "NCCL":
        CONDITIONS["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if ranks.communicator is not None:
        return []
    note = (
        f"No peer access between GPUs {', '.join(pairs_without_access())}: our collectives read "
        "the memory of other GPUs, so they and our row-parallel layer are left out, and "
        f"{ranks.peer} is measured alone. Pipes work: their copies between these GPUs go through "
        "pinned memory of the host. (`nvidia-smi topo -p2p r` shows which GPUs can read each "
        "other; some virtual machines prevent it.)"
    )
    return [{"note": note}]


def agreed(rows: list[dict[str, Any]], options: Options) -> list[dict[str, Any]]:
    """The rows of a case on all ranks: an error if any failed, which later cases survive."""
    ranks = joined(options.device.type)
    failed = ranks.sum(any("error" in row for row in rows))
    if not failed:
        return rows
    if ranks.communicator is not None:  # A failure ends it.
        ranks.communicator.close()
        ranks.communicator = Communicator.from_process_group(ranks.control, timeout=TIMEOUT)
    error = f"RuntimeError: {failed} other ranks failed"
    return [row for row in rows if "error" in row] or [{"case": "another rank", "error": error}]


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The calls of a case, with their errors."""
    ranks, quick = joined(options.device.type), options.quick
    kind, *details = case.split(", ")
    if kind == "pipe":
        return of_pipe(int(details[0].split()[0]), ranks, quick)
    if kind == "row-parallel layer":
        return of_layer(int(details[0].split()[0]), ranks, quick)
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
    wrong = lambda name: buffers.wrong(calls[name])
    return compared(calls, wrong, fields, ranks, bus(kind, ranks.ranks), quick)


def compared(
    calls: Calls,
    wrong: Callable[[str], int],
    fields: Mapping[str, Any],
    ranks: Ranks,
    busbw: float,
    quick: bool,
) -> Turns:
    """Calls that all ranks time together.

    Args:
        calls: the candidates.
        wrong: the number of wrong elements, of all ranks together, after a call of a candidate.
        fields: of the case's rows.
        ranks: this one and the others.
        busbw: gigabytes over the bus per gigabyte of ``size``, as nccl-tests' PERFORMANCE.md has
            them.
        quick: whether few rounds will do.
    """
    found = {name: wrong(name) for name in calls}

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        rows = {}
        for name, seconds in medians.items():
            rate = fields["size"] / seconds / 1e9
            rows[name] = {"algbw": rate, "busbw": rate * busbw, "wrong": found[name] + wrong(name)}
        return rows

    runners = {name: ranks.turn(call) for name, call in calls.items()}
    return Turns(runners, 1, 2 if quick else 9, more, fields=fields)


def ones(
    rank: int, ranks: int, tokens: int, features: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """A rank's input, ``[tokens, inner / ranks]``, and its part of the weight: zeros and ones."""
    hidden, inner = features
    columns = torch.arange(inner // ranks, device=device)
    rows, out = (torch.arange(count, device=device)[:, None] for count in (tokens, hidden))
    x = (columns + rows + rank) % math.ceil(inner / MOST_ONES) == 0
    weight = (columns * 3 + out + rank) % 13 < 7
    return x.to(torch.bfloat16), weight.to(torch.bfloat16)


def of_layer(tokens: int, ranks: Ranks, quick: bool) -> Turns:
    """Size and count are those of the result that is summed."""
    features, device = TINY_FEATURES if quick else FEATURES, ranks.device
    parts = [ones(rank, ranks.ranks, tokens, features, device) for rank in range(ranks.ranks)]
    right = sum(functional.linear(x.float(), weight.float()) for x, weight in parts)
    checked = parts[ranks.rank]
    random = torch.randn_like(checked[0]), torch.randn_like(checked[1]) * features[1] ** -0.5

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        product = functional.linear(x, weight)
        dist.all_reduce(product)
        return product

    layers: dict[str, Callable[..., Tensor]] = {ranks.peer: theirs}
    if ranks.communicator is not None:
        plain = "cublas" if device.type == "cuda" else "auto"
        layers[OURS] = functools.partial(row_linear, comm=ranks.communicator, algorithm=plain)
    calls = {name: functools.partial(layer, *random) for name, layer in layers.items()}
    fields = {
        "part": f"Row-parallel layer; size of its result; {ranks.ranks} ranks",
        "size": 2 * tokens * features[0],
        "count": tokens * features[0],
        "redop": "sum",
    }

    def wrong(name: str) -> int:
        return ranks.sum(int((layers[name](*checked).float() != right).sum()))

    return compared(calls, wrong, fields, ranks, bus("all_reduce", ranks.ranks), quick)


def by_hand(stages: Sequence[nn.Module], devices: list[torch.device], x: Tensor) -> Tensor:
    """The model's result, on the last device."""
    results = []
    for part in x.chunk(CHUNKS):
        for module, device in zip(stages, devices, strict=True):
            part = module(part.to(device, non_blocking=True))
        results.append(part)
    return torch.cat(results)


def of_pipe(rows: int, ranks: Ranks, quick: bool) -> Turns:
    """In rank 0, over all GPUs; the others wait. Size is that of what a micro-batch hands on."""
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
    layers = nn.Sequential(*(layer for stage in copy.deepcopy(stages) for layer in stage))
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
        BY_HAND: lambda: step(lambda: by_hand(stages, devices, x), stages),
        OURS: lambda: step(lambda: pipe(x), pipe),
    }

    def wrong() -> int:
        return int((steps[OURS]() != steps[BY_HAND]()).sum())

    before = wrong()
    fields = {
        "part": f"Pipe of {len(devices)} stages; size of what a micro-batch hands on",
        "size": 2 * rows * width,
        "count": rows * width,
        "redop": "none",
    }
    runners = {name: repeated(step, 1, WARMUP) for name, step in steps.items()}
    more = lambda _: {OURS: {"wrong": before + wrong()}}
    return Turns(runners, 1, 2 if quick else 9, more, fields=fields)
