"""Act 1: a small GPT trains through a pipe, and beside it the unpiped model on the same batches."""

from __future__ import annotations

import copy
import csv
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from demo import memory
from demo.data import batches, standard_library
from demo.model import CHUNKS, SCHEDULE, STAGES, new_model, new_pipe, token_loss
from demo.results import Check, SpeedUp, Spread
from demo.sizes import Sizes
from pipekernels import Pipe, Timeline

UNPIPED, FAIRSCALE, PIPE = f"unpiped, {STAGES} threads", "fairscale's Pipe", "Pipe"
LEARNING_RATE = 3e-3
TIMELINES = 5  # The last steps; the one with the median bubble is drawn.
# A pipe sums the gradients of microbatches where one product sums those of the batch: losses
# differ by rounding, which training amplifies.
LOSS_LIMIT = 1e-5  # About 20 units in the last place of a loss of a few nats.


@dataclass(frozen=True)
class Training:
    """Results of act 1; speeds in tokens per second, memory in MiB."""

    model: nn.Sequential
    timeline: Timeline
    speeds: dict[str, Spread]
    memory: dict[str, float]
    speed_ups: list[SpeedUp]
    checks: list[Check]


class Trainer:
    """A model with its optimizer; records losses and speeds of its steps.

    Args:
        model: trained in place.
        backward: from a batch and its target to gradients and a loss.
    """

    def __init__(self, model: nn.Module, backward: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.losses: list[float] = []
        self.speeds: list[float] = []  # Tokens per second.
        self._backward = backward
        self._optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))

    def step(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch."""
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._backward(x, y)
        self._optimizer.step()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        self.speeds.append(x.numel() / (time.perf_counter() - begin))
        self.losses.append(loss.item())


def run(sizes: Sizes, output: Path) -> Training:
    """Train and measure; write ``losses.csv`` and ``timeline.json``."""
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{stage % gpus}" if gpus else "cpu" for stage in range(STAGES)]
    corpus, model = standard_library(), new_model(sizes)
    print(
        f"\nAct 1: a GPT with {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters "
        f"trains on {corpus.numel() / 1e6:.1f} MB of Python sources,\n{STAGES} stages on "
        f"{', '.join(devices)}, {sizes.batch} x {sizes.context} bytes a step in {CHUNKS} "
        f"microbatches, schedule {SCHEDULE}"
    )
    torch.set_num_threads(STAGES)
    pipe = new_pipe(copy.deepcopy(model).to(devices[0]), devices)
    trainers = _trainers(pipe, model, devices)
    timelines = _train(pipe, trainers, devices, corpus, sizes)
    timeline = sorted(timelines, key=lambda timeline: timeline.bubble)[len(timelines) // 2]
    timeline.save_trace(output / "timeline.json")
    print("measuring memory in new processes, whose server imports torch and transformers")
    used = memory.measure(sizes)

    losses = [trainers[name].losses for name in (PIPE, UNPIPED)]
    with open(output / "losses.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "piped_loss", "unpiped_loss"])
        table.writerows([step, *row] for step, row in enumerate(zip_longest(*losses), 1))
    speeds = {
        name: Spread.of(trainer.speeds[sizes.untimed_steps : sizes.compared_steps])
        for name, trainer in trainers.items()
    }
    ours = speeds[PIPE].median
    worst = max(abs(a - b) for a, b in zip(*losses, strict=False))
    check = Check(
        f"losses of the first {sizes.compared_steps} steps, piped and unpiped, differ by "
        f"{worst:.1e} at most (limit {LOSS_LIMIT:.0e})",
        worst <= LOSS_LIMIT,
    )
    for name, speed in speeds.items():
        print(f"{name:>24}: {speed} tokens/s, Pipe {ours / speed.median:.2f}x as fast")
    for name, mebibytes in used.items():
        print(f"{name:>24}: {mebibytes:.1f} MiB at the peak of a step, on CPUs")
    print(f"idle {timeline.bubble:.1%} of the time")
    return Training(
        model=pipe.to_sequential().cpu(),
        timeline=timeline,
        speeds=speeds,
        memory=used,
        speed_ups=[
            SpeedUp("training step", name, ours / speed.median)
            for name, speed in speeds.items()
            if name != PIPE
        ],
        checks=[check],
    )


def _trainers(pipe: Pipe, model: nn.Sequential, devices: list[str]) -> dict[str, Trainer]:
    """The pipe and its peers, each with the weights of ``model``."""
    peers: dict[str, nn.Module] = {UNPIPED: copy.deepcopy(model).to(devices[0])}
    if importlib.util.find_spec("fairscale") is None:
        print("fairscale is not installed: its Pipe is left out")
    else:
        import fairscale.nn

        peers[FAIRSCALE] = new_pipe(copy.deepcopy(model), devices, fairscale.nn.Pipe)

    def trainer(peer: nn.Module) -> Trainer:
        def backward(x: Tensor, y: Tensor) -> Tensor:
            loss = token_loss(peer(x), y)
            loss.backward()
            return loss

        return Trainer(peer, backward)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return pipe.train_step(x, y, token_loss, schedule=SCHEDULE)

    trainers = {name: trainer(peer) for name, peer in peers.items()}
    return {**trainers, PIPE: Trainer(pipe, train_step)}


def _train(
    pipe: Pipe, trainers: dict[str, Trainer], devices: list[str], corpus: Tensor, sizes: Sizes
) -> list[Timeline]:
    """All trainers step in turn, then the pipe alone; returns the timelines of its last steps."""
    in_turn = list(trainers.values())
    timelines: list[Timeline] = []
    steps = sizes.compared_steps + sizes.pipe_only_steps
    data = batches(corpus, steps, sizes.batch, sizes.context, seed=0)
    with tqdm(data, "training", steps, unit="step", mininterval=1) as bar:
        for step, (x, y) in enumerate(bar):
            x, y = x.to(devices[0]), y.to(devices[-1])
            if step < sizes.compared_steps:
                for trainer in in_turn:
                    trainer.step(x, y)
                in_turn.append(in_turn.pop(0))
            else:
                with pipe.timeline() as timeline:
                    trainers[PIPE].step(x, y)
                timelines = [*timelines, timeline][-TIMELINES:]
            bar.set_postfix_str(f"loss {trainers[PIPE].losses[-1]:.3f}", refresh=False)
    return timelines
