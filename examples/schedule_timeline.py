"""Write a custom schedule, look at it on a timeline, and train with it.

    python examples/schedule_timeline.py

A schedule is data: for each lane the actions that it runs in order. Prints GPipe's, 1F1B's and the
new one's as ideal lanes would run them, runs them in turn on this CPU, and compares the gradients
with those of the plain model. --folder gets traces of what ran, for Perfetto.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from pipekernels import Pipe, Timeline
from pipekernels.pipeline.schedule import SCHEDULES, Action, Program, simulate

STAGES, CHUNKS, WIDTH = 3, 6, 256


def eager(stages: int, micro_batches: int) -> Program:
    """Eager 1F1B (Zhuang et al., 2022): 1F1B with up to ``2 * (stages - stage) - 1`` forwards
    ahead. A stage holds as many microbatches, and need not wait for a neighbour that is late."""
    lanes = []
    for stage in range(stages):
        forwards = [Action("F", stage, m) for m in range(micro_batches)]
        backwards = [Action("B", stage, m) for m in range(micro_batches)]
        ahead = min(2 * (stages - stage) - 1, micro_batches)
        actions = forwards[:ahead]
        for m, backward in enumerate(backwards):
            actions += [backward, *forwards[ahead + m : ahead + m + 1]]
        lanes.append(actions)
    return Program(lanes)


# From here on it has a name like the schedules that are there.
SCHEDULES["eager"] = eager


def draw(program: Program) -> str:
    """A row per lane and three characters per unit of time: a forward is the number of its
    microbatch, a backward, which takes two units, that in brackets."""
    simulation = simulate(program)
    lines = []
    for lane in program.lanes:
        row = [" . "] * round(simulation.makespan)
        for action in lane:
            begin, m = round(simulation.start[action]), action.micro_batch
            parts = [f" {m} "] if action.type == "F" else [f"[{m} ", "  ]"]
            row[begin : begin + len(parts)] = parts
        lines.append("  " + "".join(row).rstrip())
    return "\n".join([*lines, f"  idle: {simulation.bubble:.0%} of the time"])


def train(pipe: Pipe, x: torch.Tensor, target: torch.Tensor, schedule: str) -> Timeline:
    """A step with a schedule, recorded; the first one only warms up."""
    for _ in range(2):
        pipe.zero_grad()
        with pipe.timeline() as timeline:
            pipe.train_step(x, target, functional.mse_loss, schedule=schedule)
    return timeline


def main() -> None:
    """Draw, run and compare the schedules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for traces")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]
    plain = nn.Sequential(*layers).double()
    pipe = Pipe(
        copy.deepcopy(plain), [1] * STAGES, devices=["cpu"] * STAGES, chunks=CHUNKS,
        checkpoint="never",
    )  # fmt: skip
    x, target = torch.randn(2, 16 * CHUNKS, WIDTH, dtype=torch.float64)
    functional.mse_loss(plain(x), target).backward()
    expected = [parameter.grad for parameter in plain.parameters()]

    for name in ("gpipe", "1f1b", "eager"):
        print(f"{name}:\n{draw(SCHEDULES[name](STAGES, CHUNKS))}")
        timeline = train(pipe, x, target, name)
        grads = [parameter.grad for parameter in pipe.parameters()]
        torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10)
        if args.folder is not None:
            timeline.save_trace(args.folder / f"{name}.json")
    print("all gradients are those of the plain model")


if __name__ == "__main__":
    main()
