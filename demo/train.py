"""Act 1: a small GPT trains in two stages, one process each, on our messages and on Gloo, and in
one process of two threads by gradient accumulation over the same microbatches."""

from __future__ import annotations

import csv
import ctypes
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from tqdm import tqdm

from demo.data import batches, standard_library
from demo.model import new_model, token_loss
from demo.ranks import RANKS, processes
from demo.results import Check, SpeedUp, Spread
from demo.sizes import Sizes
from pipekernels import Pipe

ACCUMULATED = f"one process, {RANKS} threads, accumulation"
PIPEKERNELS, GLOO = (f"{RANKS} stages, {backend}" for backend in ("pipekernels", "Gloo"))
BACKENDS = {ACCUMULATED: (1, "gloo"), GLOO: (RANKS, "gloo"), PIPEKERNELS: (RANKS, "pipekernels")}
CHUNKS = 16
LEARNING_RATE = 3e-3
# Two threads divide the sums of a product otherwise than one: losses differ by rounding, which
# training amplifies.
LOSS_LIMIT = 1e-5  # About 20 units in the last place of a loss of a few nats.
# From malloc.h. Tensors of 64 KiB or more get pages that are unmapped when they are freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SEPARATE_PAGES = 64 << 10


class Task(NamedTuple):
    """What a stage did for a microbatch, and when, in seconds."""

    kind: str  # F or B.
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Training:
    """Results of act 1: speeds in tokens per second, memory in MiB of the largest process."""

    model: nn.Sequential
    tasks: list[Task]  # Of the last step.
    speeds: dict[str, Spread]
    memory: dict[str, float]
    speed_ups: list[SpeedUp]
    checks: list[Check]


def run(sizes: Sizes, output: Path) -> Training:
    """Train and measure; write ``losses.csv``."""
    corpus, model = standard_library(), new_model(sizes)
    print(
        f"\nAct 1: a GPT with {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters "
        f"trains on {corpus.numel() / 1e6:.1f} MB of Python sources,\n{sizes.batch} x "
        f"{sizes.context} bytes a step in {CHUNKS} microbatches; stages are processes of one "
        "thread under torch's Schedule1F1B"
    )
    losses: dict[str, list[float]] = {name: [] for name in BACKENDS}
    speeds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    memory: dict[str, float] = {}
    rounds = [sizes.steps_of_a_round] * (1 + sizes.compared_rounds)
    with ExitStack() as stack:
        turns = {
            name: stack.enter_context(processes(count, Trainer, sizes, backend=backend))
            for name, (count, backend) in BACKENDS.items()
        }
        in_turn = list(turns)
        for round_, steps in enumerate(tqdm(rounds, "training", unit="round")):
            for name in in_turn:
                *_, (found, seconds) = turns[name]("train", steps)  # The last stage has the loss.
                losses[name] += found
                if round_:  # The first is a warm-up.
                    speeds[name] += [sizes.batch * sizes.context / each for each in seconds]
            in_turn.append(in_turn.pop(0))
        memory = {name: max(turn("peak")) for name, turn in turns.items()}
        if sizes.further_steps:
            print(f"{sizes.further_steps} further steps of {PIPEKERNELS}")
            *_, (found, _) = turns[PIPEKERNELS]("train", sizes.further_steps)
            losses[PIPEKERNELS] += found
        tasks = [task for of_stage in turns[PIPEKERNELS]("last_tasks") for task in of_stage]
        for part in turns[PIPEKERNELS]("weights"):
            model.load_state_dict(
                {name: torch.from_numpy(array) for name, array in part.items()}, strict=False
            )
    with open(output / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows([name, *of_steps] for name, of_steps in losses.items())
    spreads = {name: Spread.of(samples) for name, samples in speeds.items()}
    for name, spread in spreads.items():
        print(f"{name:>38}: {spread} tokens/s, {memory[name]:.0f} MiB in the largest process")
    ours = spreads[PIPEKERNELS].median
    return Training(
        model=model,
        tasks=tasks,
        speeds=spreads,
        memory=memory,
        speed_ups=[
            SpeedUp("training step", name, ours / spread.median)
            for name, spread in spreads.items()
            if name != PIPEKERNELS
        ],
        checks=_checks(losses),
    )


def _checks(losses: dict[str, list[float]]) -> list[Check]:
    compared = len(losses[GLOO])
    ours = losses[PIPEKERNELS][:compared]
    different = sum(a != b for a, b in zip(ours, losses[GLOO], strict=True))
    worst = max(abs(a - b) for a, b in zip(ours, losses[ACCUMULATED], strict=True))
    return [
        Check(
            f"{different} of {compared} losses of the stages differ from Gloo's (limit 0)",
            different == 0,
        ),
        Check(
            f"they differ by {worst:.1e} at most from one process's (limit {LOSS_LIMIT:.0e})",
            worst <= LOSS_LIMIT,
        ),
    ]


class TimedStage(PipelineStage):
    """Records when it computes; it waits for messages in between."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        super().__init__(module, rank, RANKS, torch.device("cpu"))
        self.tasks: list[Task] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        begin = time.monotonic()  # One clock for all processes.
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._record("F", fwd_chunk_id, begin)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        begin = time.monotonic()
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self._record("B", bwd_chunk_id, begin)

    def _record(self, kind: str, microbatch: int, begin: float) -> None:
        self.tasks.append(Task(kind, self.stage_index, microbatch, begin, time.monotonic()))


class Trainer:
    """A process's part of the model with its optimizer: a stage, or all of it without other ranks.

    Args:
        rank: of this process, the index of its stage.
        sizes: of the model and its batches.
    """

    def __init__(self, rank: int, sizes: Sizes) -> None:
        self._alone = dist.get_world_size() == 1
        torch.set_num_threads(RANKS if self._alone else 1)
        data = batches(standard_library(), sizes.most_steps, sizes.batch, sizes.context, seed=0)
        self._batches = list(data)
        token_loss(new_model(sizes)(self._batches[0][0][:1]), self._batches[0][1][:1]).backward()
        self._libc = ctypes.CDLL(None)
        self._libc.malloc_trim(0)
        self._baseline = _resident("VmRSS")  # The libraries have allocated what they keep.
        model = new_model(sizes)
        half = len(model) // 2
        pipe = Pipe(model, [half, len(model) - half], devices=["cpu"] * RANKS)
        self._module: nn.Module = model if self._alone else pipe.partitions[rank]
        self._optimizer = torch.optim.AdamW(self._module.parameters(), LEARNING_RATE)
        self._first, self._last = self._alone or rank == 0, self._alone or rank == RANKS - 1
        self._stage: Any = None  # Alone, it has no schedule either.
        self._schedule: Any = None
        if not self._alone:
            self._stage = TimedStage(self._module, rank)
            self._schedule = Schedule1F1B(self._stage, CHUNKS, loss_fn=token_loss)

    def __call__(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def train(self, steps: int) -> tuple[list[float], list[float]]:
        """Losses of the last stage, and seconds, of the next batches."""
        losses, times = [], []
        for _ in range(steps):
            x, y = self._batches.pop(0)
            begin = time.perf_counter()
            self._optimizer.zero_grad()
            found = self._accumulate(x, y) if self._schedule is None else self._run(x, y)
            self._optimizer.step()
            times.append(time.perf_counter() - begin)
            losses.append(sum(loss.item() for loss in found) / CHUNKS)
        return losses, times

    def _accumulate(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            loss = token_loss(self._module(part), target)
            (loss / CHUNKS).backward()
            losses.append(loss.detach())
        return losses

    def _run(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self._stage.tasks.clear()
        given: dict[str, Any] = {"target": y, "losses": losses} if self._last else {}
        self._schedule.step(*([x] if self._first else []), **given)
        return losses

    def peak(self) -> float:
        """MiB, above a process without a model, at the peak of a further step."""
        self._libc.mallopt(M_MMAP_THRESHOLD, SEPARATE_PAGES)
        self._libc.mallopt(M_TRIM_THRESHOLD, 0)
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # The peak is now what is resident.
        self.train(1)
        return (_resident("VmHWM") - self._baseline) / 1024

    def last_tasks(self) -> list[Task]:
        """What this stage did in the last step."""
        tasks: list[Task] = self._stage.tasks
        return tasks

    def weights(self) -> dict[str, Any]:
        """By their names in the model."""
        return {name: tensor.numpy() for name, tensor in self._module.state_dict().items()}


def _resident(field: str) -> int:
    """KiB, at present (``"VmRSS"``) or at the peak (``"VmHWM"``)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])
