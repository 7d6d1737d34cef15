"""A pipeline of 4 stages on one GPU against the same model without one: time and memory.

With all stages on one device nothing can overlap, so this measures the overhead of the pipeline.
``plain`` is the model on the whole batch; ``loop`` is the model over the same microbatches, the
same work as that of a pipe. ``pipe`` is ``loss_fn(pipe(x), y).backward()``; the schedules are
``pipe.train_step``; after a comma is the mode of checkpointing. The small model is bound by
launches, the large one by its matrix products. Memory is what a step allocates at its peak.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.pipeline.train_step import accumulate, piped
from bench.timing import call_seconds
from demo.gpt import VOCABULARY, gpt
from demo.model import token_loss
from pipekernels import Pipe

STAGES = 4
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved": {"lanes": 2}, "zb-h1": {},
}  # fmt: skip
# Width, blocks, heads, bytes of a sequence, sequences.
MODELS = {"large": (1024, 14, 16, 512, 32), "small": (256, 14, 4, 128, 16), "tiny": (8, 2, 2, 4, 4)}
DTYPE = torch.bfloat16
TIMED = ("loop", "plain", "pipe", *SCHEDULES)
PEAKS = (*TIMED[:3], "pipe, except_last", "pipe, always", "1f1b", "1f1b, always")


def _cases(model: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{model}, 1 chunk": TIMED[:3],
        f"{model}, 4 chunks": TIMED,
        f"{model}, 4 chunks, memory": PEAKS,
    }


GPU = _cases("large") | _cases("small")
GPU_QUICK = _cases("tiny")
BASE = "loop"
COLUMNS = ("loss",)
CONDITIONS = {
    "models": "byte-level GPTs in bfloat16: "
    + "; ".join(
        f"{name}: {blocks} blocks of width {width}, {batch} x {context} bytes"
        for name, (width, blocks, _, context, batch) in MODELS.items()
    ),
    "pipeline": f"{STAGES} stages on one GPU",
    "timing": "forward, loss and backward, until the device is idle; candidates in turn, medians",
}


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32."""
    return token_loss(logits.float(), target)


class Case:
    """A model, its data, and steps of several kinds on their own weights."""

    def __init__(self, model: str, chunks: int, device: torch.device) -> None:
        width, blocks, heads, context, batch = MODELS[model]
        torch.manual_seed(0)
        self.device, self.chunks = device, chunks
        self.model = gpt(width, blocks, heads, context).to(device=device, dtype=DTYPE)
        self.x, self.y = (
            torch.randint(VOCABULARY, (batch, context), device=device) for _ in range(2)
        )

    def step(self, way: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        """A module, and a step of it, which returns its loss."""
        kind: Any
        kind, _, checkpoint = way.partition(", ")
        module: nn.Module = self.model
        if kind not in ("plain", "loop"):
            layers, devices = copy.deepcopy(self.model), [self.device] * STAGES
            module = piped(layers, self.chunks, devices, checkpoint=checkpoint or "never")
        task = module, self.x, self.y, loss_fn

        def run() -> torch.Tensor:
            if isinstance(module, Pipe) and kind in SCHEDULES:
                return module.train_step(*task[1:], schedule=kind, **SCHEDULES[kind])
            return accumulate(task, self.chunks if kind == "loop" else 1)

        return module, run


def peak(module: nn.Module, step: Callable[[], Any], device: torch.device) -> float:
    """Peak bytes allocated by a step, without gradients; 1 on a CPU, where none are counted."""
    module.zero_grad()
    if device.type != "cuda":
        step()
        return 1.0
    gc.collect()  # Else memory of other modules might be freed meanwhile.
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    own = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    return float(torch.cuda.max_memory_allocated(device) - before - own)


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Times, or peaks of memory, of all kinds of steps."""
    model, chunks, *memory = case.split(", ")
    made = Case(model, int(chunks.split()[0]), options.device)
    ways = {name: made.step(name) for name in names}
    device = options.device
    if memory:
        peaks = {n: functools.partial(peak, *way, device) for n, way in ways.items()}
        return Turns(peaks, 3, 2, fields={"part": "Memory", "unit": "bytes"})

    def timed(module: nn.Module, step: Callable[[], Any]) -> Callable[[], float]:
        """Gradients are dropped before the clock starts."""

        def run() -> float:
            module.zero_grad()
            return call_seconds(step, device)

        return run

    def losses(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        return {name: {"loss": step().item()} for name, (_, step) in ways.items()}

    runners = {name: timed(*way) for name, way in ways.items()}
    warmup, rounds = (0, 2) if options.quick else (4, 12)
    return Turns(runners, warmup, rounds, losses, fields={"part": "Time"})
