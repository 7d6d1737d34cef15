"""Tensor-parallel layers on CPU ranks, against those of PyTorch and fairscale.

An MLP, Linear + GELU + Linear, whose first layer is column-parallel and whose second one is
row-parallel: one all-reduce forward and one backward. Input and output are replicated.

* ``one thread``, ``two threads``: the bare module in one process; one thread is the base of
  ``speed-up``.
* ``pipekernels``: ``tensor_parallelize`` on two processes of one thread each, as all below.
* ``DTensor``: ``torch.distributed.tensor.parallel`` on Gloo; then the same program on the
  ``torch.distributed`` backend ``pipekernels``.
* ``fairscale``: the layers of Megatron-LM, on Gloo.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.harness import Measured
from bench.processes import Processes, closing
from bench.report.tables import speed_ups

RANKS = 2
WIDTH, HIDDEN = 768, 3072
CASES = {  # rows, whether there is a backward, steps per turn
    "1 row, forward": (1, False, 40),
    "16 rows, forward": (16, False, 20),
    "256 rows, forward": (256, False, 3),
    "256 rows, forward and backward": (256, True, 2),
}
CANDIDATES = dict.fromkeys(
    CASES,
    (
        *("one thread", "two threads", "pipekernels", "DTensor, Gloo"),
        *("DTensor, backend pipekernels", "fairscale, Gloo"),
    ),
)
QUICK = {"16 rows, forward": ("one thread", "two threads", "pipekernels", "DTensor, Gloo")}
BASE = "one thread"
CONDITIONS = {
    "model": f"Linear({WIDTH}, {HIDDEN}) + GELU + Linear({HIDDEN}, {WIDTH}), float32",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, candidates in turn, the first step of each turn does not count, "
    "medians",
}

Serve = Callable[[Callable[[], float]], None]


def build() -> nn.Sequential:
    """The whole MLP, with the same weights in all processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def serve_steps(module: nn.Module, case: str, serve: Serve, threads: int = 1) -> None:
    """Check ``module`` once against the whole MLP, then serve turns of ``case``.

    Raises:
        AssertionError: results differ from the MLP's by more than rounding.
    """
    torch.set_num_threads(threads)
    rows, backward, steps = CASES[case]
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    x.requires_grad_(backward)

    def step() -> torch.Tensor:
        with torch.set_grad_enabled(backward):
            y = module(x)
        if backward:
            module.zero_grad()
            x.grad = None
            y.backward(grad)
        return y

    def turn() -> float:
        step()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begin) / steps

    y, found = step().detach(), x.grad
    leaf = x.detach().requires_grad_()
    wanted = build()(leaf)
    wanted.backward(grad)
    torch.testing.assert_close(y, wanted.detach())
    if backward:
        torch.testing.assert_close(found, leaf.grad)
    serve(turn)


def _bare(rank: int, port: int, serve: Serve, case: str, threads: int) -> None:
    serve_steps(build(), case, serve, threads)


def _join(backend: str, rank: int, port: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )


def _pipekernels(rank: int, port: int, serve: Serve, case: str) -> None:
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import tensor_parallelize

    _join("gloo", rank, port)
    with Communicator.from_process_group() as comm:
        module = build()
        tensor_parallelize(module, {"0": "column", "2": "row"}, comm)
        serve_steps(module, case, serve)


def _dtensor(rank: int, port: int, serve: Serve, case: str, backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if backend == "pipekernels":
        import pipekernels.distributed  # noqa: F401 - registers the backend
    _join(backend, rank, port)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(build(), init_device_mesh("cpu", (RANKS,)), plan)
    serve_steps(module, case, serve)


def _fairscale(rank: int, port: int, serve: Serve, case: str) -> None:
    from fairscale.nn.model_parallel import initialize_model_parallel
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    _join("gloo", rank, port)
    initialize_model_parallel(RANKS)
    whole = build()
    column = ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False)
    row = RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True)
    with torch.no_grad():
        column.weight.copy_(whole[0].weight.chunk(RANKS)[rank])
        column.bias.copy_(whole[0].bias.chunk(RANKS)[rank])
        row.weight.copy_(whole[2].weight.chunk(RANKS, 1)[rank])
        row.bias.copy_(whole[2].bias)
    serve_steps(nn.Sequential(column, nn.GELU(), row), case, serve)


WORKERS: dict[str, tuple[Any, ...]] = {  # ranks, worker, and its arguments after the case
    "one thread": (1, _bare, 1),
    "two threads": (1, _bare, RANKS),
    "pipekernels": (RANKS, _pipekernels),
    "DTensor, Gloo": (RANKS, _dtensor, "gloo"),
    "DTensor, backend pipekernels": (RANKS, _dtensor, "pipekernels"),
    "fairscale, Gloo": (RANKS, _fairscale),
}


def candidates(case: str, names: Sequence[str]) -> dict[str, Processes]:
    """Those of ``names`` that are installed."""
    if importlib.util.find_spec("fairscale") is None and "fairscale, Gloo" in names:
        print("fairscale is not installed: left out")
        names = [name for name in names if name != "fairscale, Gloo"]
    found = {}
    for name in names:
        ranks, worker, *arguments = WORKERS[name]
        found[name] = Processes(ranks, worker, case, *arguments)
    return found


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Every candidate in turn."""
    for case, names in plan.items():
        with closing(candidates(case, names)) as runners:
            samples = harness.alternate(runners, warmup=3, rounds=5 if quick else 60)
        yield harness.compared(case, samples, BASE)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and case."""
    return speed_ups(rows, BASE)
