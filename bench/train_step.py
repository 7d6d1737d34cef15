"""Training steps through ``Pipe`` under each schedule against the bare model, on CPU stages.

2 stages, no checkpointing, one intra-op thread per lane. The time is that of forward, loss and
backward; ``sequential`` is the bare module on the whole batch with one thread. ``autograd`` is
``loss_fn(pipe(x), y).backward()``, the others are ``pipe.train_step`` under the schedule of that
name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from bench import harness
from bench.pipe import build
from bench.report import speed_ups
from demo.gpt import VOCABULARY, gpt
from pipekernels import Pipe

STAGES = 2
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
WIDTH, BATCH = 512, 2048
BLOCKS, HEADS, GPT_WIDTH, CONTEXT, SEQUENCES = 8, 4, 256, 128, 16
CONDITIONS = {
    "wide": f"8 x (Linear({WIDTH}) + GELU), batch {BATCH}, mean squared error, float32",
    "gpt": f"byte-level GPT, {BLOCKS} blocks of width {GPT_WIDTH}, {SEQUENCES} x {CONTEXT} bytes, "
    "cross-entropy, float32",
    "pipeline": f"{STAGES} stages, no checkpointing, one thread per lane",
    "timing": "forward, loss and backward, candidates in turn, medians",
}


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all bytes of ``[batch, time, vocabulary]`` logits."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def wide() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    """Model, input, target and loss function."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return build(WIDTH), x, y, mse_loss


def byte_gpt() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    """Model, input, target and loss function."""
    torch.manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (SEQUENCES, CONTEXT)) for _ in range(2))
    return gpt(GPT_WIDTH, BLOCKS, HEADS, CONTEXT), x, y, token_loss


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "wide, 8 chunks": (wide, 8),
    "wide, 4 chunks": (wide, 4),
    "gpt, 8 chunks": (byte_gpt, 8),
}


def _timed(module: nn.Module, threads: int, step: Callable[[], Any]) -> Callable[[], float]:
    """``step`` with gradients dropped before the clock starts."""

    def run() -> float:
        torch.set_num_threads(threads)
        module.zero_grad()
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return run


def candidates(make: Callable[[], Any], chunks: int) -> dict[str, Callable[[], float]]:
    """The bare model, the pipe under autograd, and every schedule; each has a model of its own."""
    module, x, y, loss_fn = make()
    found = {"sequential": _timed(module, 1, lambda: loss_fn(module(x), y).backward())}

    def add(name: str, step: Callable[[Pipe], Any]) -> None:
        layers = make()[0]
        balance = [len(layers) // 2, len(layers) - len(layers) // 2]
        pipe = Pipe(layers, balance, devices=["cpu"] * STAGES, chunks=chunks, checkpoint="never")
        found[name] = _timed(pipe, STAGES, lambda: step(pipe))

    add("autograd", lambda pipe: loss_fn(pipe(x), y).backward())
    for schedule in SCHEDULES:
        add(schedule, lambda pipe, s=schedule: pipe.train_step(x, y, loss_fn, schedule=s))
    return found


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every candidate on every case, in turn."""
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    for case, (make, chunks) in CASES.items():
        try:
            # A pipe times its ways to run on its first passes; the warm-up covers that.
            samples = harness.alternate(
                candidates(make, chunks), warmup=11, rounds=8 if args.quick else 40
            )
        finally:
            torch.set_num_threads(threads)
        for name, figures in harness.against(samples, "sequential").items():
            rows.append({"case": case, "chunks": chunks, "candidate": name, **figures})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A row per candidate and case."""
    return speed_ups(rows, "sequential")
