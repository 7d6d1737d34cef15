"""Training steps through ``Pipe`` under each schedule against the bare model, on CPU stages.

2 stages, no checkpointing, two intra-op threads. The time is that of forward, loss and
backward; ``sequential`` is the bare module on the whole batch with one thread, ``two threads`` the
same with two, as the pipes have. ``autograd`` is ``loss_fn(pipe(x), y).backward()``, the others are
``pipe.train_step`` under the schedule of that name. Gradients are compared with those of the bare
module before they are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bench.harness import Options, Turns
from demo.gpt import VOCABULARY, gpt
from pipekernels import Pipe

STAGES = 2
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
BLOCKS, HEADS, GPT_WIDTH, CONTEXT, SEQUENCES = 8, 4, 256, 128, 16
CHUNKS = (2, 4, 8, 16)
CANDIDATES = {
    f"gpt, {chunks} chunks": ("sequential", "two threads", "autograd", *SCHEDULES)
    for chunks in CHUNKS
}
QUICK = {"gpt, 8 chunks": ("two threads", "1f1b")}
BASE = "two threads"
GPT = (
    f"byte-level GPT, {BLOCKS} blocks of width {GPT_WIDTH}, {SEQUENCES} x {CONTEXT} bytes, "
    "cross-entropy, float32"
)
CONDITIONS = {
    "gpt": GPT,
    "pipeline": f"{STAGES} stages, no checkpointing, two threads; sequential: one",
    "timing": "forward, loss and backward, candidates in turn, medians",
}
Task = tuple[nn.Sequential, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]
AnyTask = tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all bytes of ``[batch, time, vocabulary]`` logits."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def byte_gpt() -> Task:
    """Model, input, target and loss function."""
    torch.manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (SEQUENCES, CONTEXT)) for _ in range(2))
    return gpt(GPT_WIDTH, BLOCKS, HEADS, CONTEXT), x, y, token_loss


def accumulate(task: AnyTask, chunks: int) -> torch.Tensor:
    """The loss, after a forward and backward of each microbatch in turn: gradient accumulation."""
    (module, x, y, loss_fn), losses = task, []
    for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        loss = loss_fn(module(part), target) * (len(part) / len(x))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def timed(
    module: nn.Module,
    threads: int,
    step: Callable[[], Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """``step`` with gradients dropped before the clock starts."""

    def run() -> float:
        torch.set_num_threads(threads)
        module.zero_grad()
        begin = clock()
        step()
        return clock() - begin

    return run


def piped(
    layers: nn.Sequential, chunks: int, devices: Sequence[Any] = ("cpu",) * STAGES, **options: Any
) -> Pipe:
    """``layers`` in stages of as many layers."""
    balance = [len(layers) // len(devices)] * len(devices)
    balance[-1] += len(layers) % len(devices)
    return Pipe(layers, balance, devices=devices, chunks=chunks, **options)


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The bare model, the pipe under autograd, and every schedule; each pipe has a model of its
    own, and the right gradients."""
    chunks = int(case.split()[1])
    module, x, y, loss_fn = byte_gpt()

    def bare() -> None:
        loss_fn(module(x), y).backward()

    def step(pipe: Pipe, name: Any) -> None:
        if name == "autograd":
            loss_fn(pipe(x), y).backward()
        else:
            pipe.train_step(x, y, loss_fn, schedule=name)

    found = {"sequential": timed(module, 1, bare), "two threads": timed(module, STAGES, bare)}
    found["sequential"]()
    wanted = [p.grad for p in module.parameters()]
    for name in [each for each in names if each not in found]:
        pipe = piped(byte_gpt()[0], chunks, checkpoint="never")
        found[name] = timed(pipe, STAGES, partial(step, pipe, name))
        found[name]()
        gradients = [p.grad for p in pipe.parameters()]
        torch.testing.assert_close(gradients, wanted, rtol=1e-3, atol=1e-6)
    warmup, rounds = (2, 4) if options.quick else (3, 24)
    return Turns({name: found[name] for name in names}, warmup, rounds)
