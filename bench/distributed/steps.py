"""Training steps under FSDP2, DDP and DTensor's tensor parallelism on CPU ranks, on this backend
and on Gloo: six blocks of a norm and an MLP that widens four times, each block sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started

RANKS, ROWS, STEPS = 2, 64, 5
KINDS = ("FSDP2", "DDP", "tensor parallel")
BOTH = ("pipekernels", "Gloo")
CANDIDATES = {f"{kind}, width {width}": BOTH for kind in KINDS for width in (128, 512)}
QUICK = {"tensor parallel, width 128": BOTH}
BASE = "Gloo"
CONDITIONS = {
    "model": f"6 blocks, {ROWS} rows, the same on every rank, cross-entropy, AdamW, float32",
    "ranks": f"{RANKS} processes of one thread; DDP's default buckets",
    "timing": "forward, backward and optimizer step, slowest rank, candidates in turn, the first "
    "step of each turn does not count, medians",
}


def build(kind: str, width: int) -> nn.Module:
    """The model, sharded or replicated as ``kind`` says; ``""`` leaves it alone."""
    torch.manual_seed(0)
    widen, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    block = nn.Sequential(nn.LayerNorm(width), widen, nn.GELU(), narrow)
    model = nn.Sequential(*[copy.deepcopy(block) for _ in range(6)])
    mesh = init_device_mesh("cpu", (RANKS,))
    for each in model.children():
        if kind == "FSDP2":
            fully_shard(each, mesh=mesh)
        elif kind == "tensor parallel":
            shards = {"1": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
            parallel.parallelize_module(each, mesh, shards)
    return nn.parallel.DistributedDataParallel(model) if kind == "DDP" else model


def stepper(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """Returns a function that takes a training step and gives its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> float:
        loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _steps(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    join(backend, rank, RANKS, port)
    kind, width = case.split(", width ")
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 1, int(width)), torch.arange(ROWS)
    step, alone = (stepper(build(each, int(width)), x, y) for each in (kind, ""))
    found, expected = (torch.tensor([take() for _ in range(3)]) for take in (step, alone))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    serve(repeated(step, STEPS))


WORKERS = {each: (RANKS, _steps, each.lower()) for each in BOTH}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Both."""
    return Turns(started(WORKERS, names, case), 1, 2 if options.quick else 20)
