"""A pipeline of 4 stages on one GPU against the same model without one: time and memory.

With all stages on one device nothing can overlap, so this measures the overhead of the pipeline.
``plain`` is the model on the whole batch; ``loop`` is the model over the same micro-batches, the
same work as that of a pipe. ``pipe`` is ``loss_fn(pipe(x), y).backward()``; the schedules are
``pipe.train_step``. The small model is bound by launches, the large one by its matrix products.
Memory is the peak of torch's allocations during the first steps, beyond weights and gradients.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.gpu.timing import Row, attempt, call_seconds, errors
from bench.pipeline.train_step import token_loss
from bench.report.tables import duration, markdown, spread
from demo.gpt import VOCABULARY, gpt
from pipekernels import Pipe

STAGES = 4
CHUNKS = (1, 4)
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved": {"lanes": 2}, "zb-h1": {},
}  # fmt: skip
CHECKPOINTS = ("never", "except_last", "always")
# Width, blocks, heads, bytes of a sequence, sequences.
MODELS = {"large": (1024, 14, 16, 512, 32), "small": (256, 14, 4, 128, 16)}
TINY = {"tiny": (8, 2, 2, 4, 4)}
DTYPE = torch.bfloat16
CONDITIONS = {
    "models": "byte-level GPTs in bfloat16: "
    + "; ".join(
        f"{name}: {blocks} blocks of width {width}, {batch} x {context} bytes"
        for name, (width, blocks, _, context, batch) in MODELS.items()
    ),
    "pipeline": f"{STAGES} stages on one GPU",
    "timing": "forward, loss and backward, until the device is idle; candidates in turn, medians",
}
Step = Callable[[], torch.Tensor]


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32."""
    return token_loss(logits.float(), target)


class Case:
    """A model, its data, and steps of several kinds on weights of their own."""

    def __init__(self, sizes: tuple[int, int, int, int, int], device: torch.device) -> None:
        width, blocks, heads, context, batch = sizes
        torch.manual_seed(0)
        self.device = device
        self.model = gpt(width, blocks, heads, context).to(device=device, dtype=DTYPE)
        self.x, self.y = (
            torch.randint(VOCABULARY, (batch, context), device=device) for _ in range(2)
        )

    def plain(self) -> tuple[nn.Module, Step]:
        """On the whole batch."""
        model = self.model

        def step() -> torch.Tensor:
            loss = loss_fn(model(self.x), self.y)
            loss.backward()
            return loss.detach()

        return model, step

    def loop(self, chunks: int) -> tuple[nn.Module, Step]:
        """Over micro-batches."""
        model = self.model

        def step() -> torch.Tensor:
            total = torch.zeros((), device=self.device)
            for x, y in zip(self.x.chunk(chunks), self.y.chunk(chunks), strict=True):
                loss = loss_fn(model(x), y) / chunks
                loss.backward()
                total += loss.detach()
            return total

        return model, step

    def pipe(self, chunks: int, checkpoint: str = "never") -> tuple[nn.Module, Step]:
        """Through autograd."""
        pipe = self._pipe(chunks, checkpoint)

        def step() -> torch.Tensor:
            loss = loss_fn(pipe(self.x), self.y)
            loss.backward()
            return loss.detach()

        return pipe, step

    def train_step(
        self, chunks: int, schedule: str, checkpoint: str = "never"
    ) -> tuple[nn.Module, Step]:
        """Under a schedule."""
        pipe = self._pipe(chunks, checkpoint)
        options = SCHEDULES[schedule]

        def step() -> torch.Tensor:
            return pipe.train_step(self.x, self.y, loss_fn, schedule=schedule, **options)

        return pipe, step

    def _pipe(self, chunks: int, checkpoint: str) -> Pipe:
        layers = copy.deepcopy(self.model)
        layers.zero_grad()
        balance = [len(layers) // STAGES] * STAGES
        balance[-1] += len(layers) % STAGES
        return Pipe(
            layers,
            balance,
            devices=[self.device] * STAGES,
            chunks=chunks,
            checkpoint=checkpoint,
        )


def timed(module: nn.Module, step: Step, device: torch.device) -> Callable[[], float]:
    """A candidate; gradients are dropped before the clock starts."""

    def run() -> float:
        module.zero_grad()
        return call_seconds(step, device)

    return run


def times(case: Case, chunks: int, quick: bool) -> Row:
    """Times of all kinds of steps with ``chunks`` chunks, measured alternately."""
    ways = {"plain": case.plain(), "loop": case.loop(chunks), "pipe": case.pipe(chunks)}
    if chunks > 1:
        ways |= {name: case.train_step(chunks, name) for name in SCHEDULES}
    runners = {name: timed(*way, case.device) for name, way in ways.items()}
    samples = harness.alternate(runners, warmup=0 if quick else 2, rounds=2 if quick else 7)
    found = {name: harness.summary(seconds) for name, seconds in samples.items()}
    losses = {}
    for name, (module, step) in ways.items():
        module.zero_grad()
        losses[name] = step().item()
    return {"ways": found, "losses": losses}


def memory(case: Case, chunks: int) -> Row:
    """Peak bytes of a step, by kind of step."""
    peaks = {}
    for name, make in {
        "plain": case.plain,
        "loop": lambda: case.loop(chunks),
        **{f"pipe, {mode}": lambda mode=mode: case.pipe(chunks, mode) for mode in CHECKPOINTS},
        "1f1b, never": lambda: case.train_step(chunks, "1f1b"),
        "1f1b, always": lambda: case.train_step(chunks, "1f1b", "always"),
    }.items():
        module, step = make()
        peaks[name] = peak(module, step, case.device)
    return {"peaks": peaks}


def peak(module: nn.Module, step: Step, device: torch.device) -> int:
    """Peak bytes allocated by the first steps, without gradients; 0 on a CPU."""
    counted = device.type == "cuda"
    if counted:
        gc.collect()  # Else memory of other modules might be freed meanwhile.
        module.zero_grad()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if counted else 0
    for _ in range(4):
        step()
    if not counted:
        return 0
    torch.cuda.synchronize(device)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    own = sum(grad.numel() * grad.element_size() for grad in grads)
    return torch.cuda.max_memory_allocated(device) - before - own


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row per model and number of chunks; times, then memory."""
    for name, sizes in (TINY if args.quick else MODELS).items():
        # Made by the first measurement, so that an error there is recorded in its row.
        case = functools.cache(lambda sizes=sizes: Case(sizes, args.device))
        for chunks in CHUNKS[-1:] if args.quick else CHUNKS:
            yield from attempt(
                {"part": "time", "model": name, "chunks": chunks},
                lambda case=case, chunks=chunks: times(case(), chunks, args.quick),
            )
        yield from attempt(
            {"part": "memory", "model": name, "chunks": CHUNKS[-1]},
            lambda case=case: memory(case(), CHUNKS[-1]),
        )


def table(rows: list[Row]) -> str:
    """Times of every way, then peaks of memory."""
    lines = []
    for row in rows:
        if "ways" not in row:
            continue
        ways = row["ways"]
        for name, figures in ways.items():
            lines.append(
                [
                    *(row["model"], str(row["chunks"]), name, duration(figures["median"])),
                    spread(figures),
                    f"{figures['median'] / ways['plain']['median']:.2f}",
                    f"{figures['median'] / ways['loop']['median']:.2f}",
                    f"{row['losses'][name]:.4f}",
                ]
            )
    header = ["model", "chunks", "way", "median", "p10 to p90", "over plain", "over loop", "loss"]
    peaks = [
        [row["model"], str(row["chunks"]), name, f"{peak / 2**20:.0f}"]
        for row in rows
        for name, peak in row.get("peaks", {}).items()
    ]
    return (
        f"{markdown(header, lines)}\n\n"
        + markdown(["model", "chunks", "way, checkpointing", "peak (MiB)"], peaks)
        + errors(rows, "part", "model", "chunks")
    )
