"""What the stages of a pipe do during a training step, recorded, beside the unpiped step.

* ``pipekernels``: ``pipe.train_step`` under 1F1B, 2 stages, 8 chunks, one thread per lane, in
  ``pipe.timeline()``; kept is the step whose time is the median.
* ``one thread``, ``two threads``: the bare module on the whole batch; ``two threads, accumulated``:
  on the same microbatches in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import Options, Turns
from bench.pipeline.pipe import check, timed
from bench.pipeline.train_step import GPT, STAGES, accumulate, byte_gpt, piped
from bench.report.tables import svg

CHUNKS, SCHEDULE = 8, "1f1b"
CASE = f"gpt, {CHUNKS} chunks, {SCHEDULE}"
ACCUMULATED = "two threads, accumulated"
CANDIDATES = {CASE: ("one thread", "two threads", ACCUMULATED, "pipekernels")}
QUICK = CANDIDATES
BASE = "two threads"
CONDITIONS = {
    "model": GPT,
    "pipeline": f"{STAGES} stages, {CHUNKS} chunks, {SCHEDULE}, no checkpointing, one thread per "
    "lane, recorded",
    "timing": "forward, loss and backward, candidates in turn, medians",
}
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
NAMES = {"F": "forward", "B": "backward"}


# By the seconds of a recorded step: ``[lane, kind, microbatch, start, end]`` of each action, in
# seconds from its start.
Steps = dict[float, list[list[Any]]]


def recorder(pipe: Any, step: Callable[[], Any], steps: Steps) -> Callable[[], float]:
    """A turn that adds its step to ``steps``."""

    def run() -> float:
        torch.set_num_threads(STAGES)
        pipe.zero_grad()
        with pipe.timeline() as timeline:
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
        (phase,) = timeline.phases
        steps[seconds] = [
            [phase.program.lane_of[e.action.stage], e.action.kind, e.action.micro_batch]
            + [round(t - begin, 7) for t in (e.start, e.end)]
            for e in sorted(phase.events, key=lambda e: e.start)
        ]
        return seconds

    return run


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """The pipe and the bare model."""
    task = module, x, y, loss_fn = byte_gpt()
    pipe = piped(byte_gpt()[0], CHUNKS, checkpoint="never")
    steps: Steps = {}

    def bare() -> None:
        loss_fn(module(x), y).backward()

    def train() -> None:
        pipe.train_step(x, y, loss_fn, schedule=SCHEDULE)

    runners = {
        "one thread": timed(module, 1, bare),
        "two threads": timed(module, STAGES, bare),
        ACCUMULATED: timed(module, STAGES, lambda: accumulate(task, CHUNKS)),
        "pipekernels": recorder(pipe, train, steps),
    }
    runners["one thread"]()
    runners["pipekernels"]()
    check(pipe.parameters(), [p.grad for p in module.parameters() if p.grad is not None])
    rounds = 2 if options.quick else 21

    def middle(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        median = statistics.median_low([*steps][-rounds:])
        return {"pipekernels": {"events": steps[median]}}

    # A pipe times its ways to run on its first passes; the warm-up covers that.
    return Turns(runners, 0 if options.quick else 11, rounds, middle)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The recorded step, a bar per lane, above bars of the unpiped steps, as an SVG file."""
    from matplotlib.patches import Patch

    found = {row["candidate"]: row for row in rows}
    events = found["pipekernels"]["events"]
    lanes = 1 + max(lane for lane, *_ in events)
    unpiped = [name for name in found if name != "pipekernels"]
    with svg(path, width=11, height=0.9 + 0.55 * (lanes + len(unpiped))) as (axis,):
        for lane, kind, micro_batch, start, end in events:
            box = [(start * 1e3, (end - start) * 1e3)]
            axis.broken_barh(box, (lane - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor="white")
            middle = (start + end) * 500
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
            axis.text(middle, lane, str(micro_batch), **style)
        for y, name in enumerate(unpiped, lanes):
            axis.broken_barh([(0, found[name]["median"] * 1e3)], (y - 0.4, 0.8), color="#bab0ac")
        names = [f"stage {lane}" for lane in range(lanes)]
        axis.set_yticks(range(lanes + len(unpiped)), names + [f"unpiped, {n}" for n in unpiped])
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel("milliseconds of a training step; numbers are microbatches")
        patches = [Patch(color=COLOURS[kind], label=name) for kind, name in NAMES.items()]
        patches.append(Patch(color="#bab0ac", label="forwards and backwards"))
        axis.legend(handles=patches, loc="lower right", fontsize=8)
