"""Trains a model through a pipeline and a copy of it unpiped, alternately on the same batches."""

from __future__ import annotations

import copy
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from demo.data import batches
from demo.gpt import gpt
from pipekernels import Pipe, Timeline

STAGES = 2
CHUNKS = 8
# The unpiped model with all threads is trained for its speed only, every so many steps.
ALL_THREADS_EVERY = 20


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, and how long to train it."""

    steps: int
    seconds: float
    batch: int = 32
    context: int = 64
    width: int = 128
    blocks: int = 6
    heads: int = 4
    learning_rate: float = 5e-3
    seed: int = 0

    def model(self) -> nn.Sequential:
        """The untrained model; the seed decides its weights."""
        torch.manual_seed(self.seed)
        return gpt(self.width, self.blocks, self.heads, self.context)


class Trainer:
    """A model with its optimizer and number of threads; records losses and times of its steps."""

    def __init__(self, name: str, model: nn.Module, settings: Settings, threads: int) -> None:
        self.name = name
        self.losses: list[float] = []
        self._model = model
        self._threads = threads
        self._tokens = settings.batch * settings.context
        self._seconds: list[float] = []
        rate = settings.learning_rate
        self._optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, rate, total_steps=settings.steps + 1, pct_start=0.1
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch."""
        torch.set_num_threads(self._threads)
        start = time.perf_counter()
        logits = self._model(x)
        loss = cross_entropy(logits.flatten(0, 1), y.to(logits.device).flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        self._seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @property
    def tokens_per_second(self) -> float:
        """By the median step."""
        return self._tokens / median(self._seconds)


def stage_devices() -> list[str]:
    """A device per stage: the GPUs in turn, or the CPU."""
    gpus = torch.cuda.device_count()
    return [f"cuda:{stage % gpus}" if gpus else "cpu" for stage in range(STAGES)]


def train(corpus: Tensor, settings: Settings) -> tuple[Pipe, list[Trainer], list[Timeline]]:
    """Train until the steps or the time is used up, with a progress bar and a table of losses.

    Returns:
        The trained pipe; the trainers: piped, unpiped and, on CPUs, unpiped with all threads; and
        the timelines of the pipe's steps.
    """
    devices = stage_devices()
    model = settings.model().to(devices[0])
    half = settings.blocks // 2
    pipe = Pipe(
        copy.deepcopy(model),
        balance=[1 + half, settings.blocks - half + 1],
        devices=devices,
        chunks=CHUNKS,
        checkpoint="never",
    )
    threads = torch.get_num_threads()
    trainers = [
        Trainer(f"Pipe, {STAGES} stages, 1 thread each", pipe, settings, 1),
        Trainer("unpiped, 1 thread", copy.deepcopy(model), settings, 1),
    ]
    in_turn = trainers[:2]
    timelines = []
    if devices[0] == "cpu":
        trainers.append(Trainer(f"unpiped, {threads} threads", model, settings, threads))

    tqdm.write(f"{'step':>6} {'piped loss':>12} {'unpiped loss':>13} {'difference':>12}")
    data = batches(corpus, settings.steps, settings.batch, settings.context, settings.seed)
    started = time.perf_counter()
    with tqdm(total=settings.steps, unit="step", desc="training", mininterval=1) as bar:
        for step, (x, y) in enumerate(data, 1):
            x, y = x.to(devices[0]), y.to(devices[-1])
            with pipe.timeline() as timeline:
                for trainer in in_turn:
                    trainer.step(x, y)
            timelines.append(timeline)
            in_turn.reverse()  # Alternate the order, for a fair comparison.
            if step % ALL_THREADS_EVERY == 1:
                for trainer in trainers[2:]:
                    trainer.step(x, y)
            bar.update()
            ours, theirs = (trainer.losses[-1] for trainer in trainers[:2])
            if step < 4 or step % 20 == 0:
                difference = abs(ours - theirs)
                tqdm.write(f"{step:>6} {ours:>12.6f} {theirs:>13.6f} {difference:>12.1e}")
            if time.perf_counter() - started > settings.seconds:
                tqdm.write(f"stopped after {settings.seconds:.0f} seconds")
                break
    torch.set_num_threads(threads)
    return pipe, trainers, timelines


def write_losses(path: Path, piped: Trainer, unpiped: Trainer) -> None:
    """All losses, one row per step."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "piped_loss", "unpiped_loss"])
        for step, row in enumerate(zip(piped.losses, unpiped.losses, strict=True), 1):
            writer.writerow([step, *row])
