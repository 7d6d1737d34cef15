"""Training steps of a GPT in two stages under 1F1B, beside one process of two threads.

The time is that of forward, loss and backward, without checkpointing; gradients are compared with
those of the whole model first.

* ``accumulated``: the bare model, on the same microbatches in turn; ``whole batch``: all at once.
* ``pipekernels``, ``Gloo``: a stage in each of two processes of one thread, under torch's
  ``Schedule1F1B``, on that backend of ``torch.distributed``.
* ``one process``: ``Pipe.train_step``, both stages in one process of two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started
from demo.gpt import VOCABULARY, gpt
from demo.model import token_loss
from pipekernels import Pipe

STAGES = 2
BLOCKS, HEADS, GPT_WIDTH, CONTEXT, SEQUENCES = 8, 4, 256, 128, 16
STEPS = 3  # Of a turn.
ALONE = ("accumulated", "whole batch", "one process")
NAMES = (*ALONE, "pipekernels", "Gloo")
CANDIDATES = {f"gpt, {chunks} chunks": NAMES for chunks in (4, 8, 16)}
QUICK = {"gpt, 8 chunks": ("accumulated", "pipekernels")}
BASE = "accumulated"
GPT = (
    f"byte-level GPT, {BLOCKS} blocks of width {GPT_WIDTH}, {SEQUENCES} x {CONTEXT} bytes, "
    "cross-entropy, float32"
)
CONDITIONS = {
    "gpt": GPT,
    "timing": "slowest process, candidates in turn, the first step of a turn left out, medians",
}
Task = tuple[Any, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]


def byte_gpt() -> Task:
    """Model, input, target and loss function."""
    torch.manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (SEQUENCES, CONTEXT)) for _ in range(2))
    return gpt(GPT_WIDTH, BLOCKS, HEADS, CONTEXT), x, y, token_loss


def accumulate(task: Task, chunks: int) -> torch.Tensor:
    """The loss, after a forward and backward of each microbatch in turn: gradient accumulation."""
    (module, x, y, loss_fn), losses = task, []
    for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        loss = loss_fn(module(part), target) * (len(part) / len(x))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def piped(
    layers: nn.Sequential, chunks: int, devices: Sequence[Any] = ("cpu",) * STAGES, **options: Any
) -> Pipe:
    """``layers`` in stages of as many layers."""
    balance = [len(layers) // len(devices)] * len(devices)
    balance[-1] += len(layers) % len(devices)
    return Pipe(layers, balance, devices=devices, chunks=chunks, **options)


def _worker(rank: int, port: int, serve: Serve, case: str, name: str) -> None:
    chunks, whole, task = int(case.split()[1]), byte_gpt(), byte_gpt()
    module, x, y, loss_fn = task
    accumulate(whole, 1)
    pipe = piped(module, chunks, checkpoint="never")
    part: nn.Module = module
    torch.set_num_threads(STAGES)
    if name not in ALONE:
        join(name.lower(), rank, STAGES, port)
        part = pipe.partitions[rank]
        stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
        schedule = Schedule1F1B(stage, chunks, loss_fn=loss_fn)

    def step() -> None:
        part.zero_grad()
        if name in ("accumulated", "whole batch"):
            accumulate(task, chunks if name == "accumulated" else 1)
        elif name == "one process":
            pipe.train_step(x, y, loss_fn, schedule="1f1b")
        elif rank:
            schedule.step(target=y)
        else:
            schedule.step(x)

    step()
    for key, found in part.named_parameters():
        wanted = whole[0].get_parameter(key).grad
        torch.testing.assert_close(found.grad, wanted, rtol=1e-3, atol=1e-6)
    serve(repeated(step, STEPS))


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every candidate, in processes of its own."""
    workers = {name: (1 if name in ALONE else STAGES, _worker, name) for name in NAMES}
    return Turns(started(workers, names, case), 1, 2 if options.quick else 12)
