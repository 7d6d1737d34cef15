"""Memory that a training step takes beyond parameters and gradients, by schedule, on CPU stages.

A byte-level GPT in 2 stages. Each candidate is a separate process, in which every tensor of
64 KiB or more has its own pages, mapped and unmapped with it. A turn resets the process's peak
of resident memory, makes a step, and counts how far above its start the peak was. The kernel counts
in steps of some pages per thread: differences below 0.3 MiB mean nothing.

* ``accumulated``: the bare module on the same microbatches in turn; ``unpiped``: on all at once.
* ``gpipe``, ``1f1b``, ``zb-h1``: ``pipe.train_step`` under that schedule, no checkpointing.
* ``gpipe, checkpointed``: with ``checkpoint="always"``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.harness import Options, Turns
from bench.pipeline.train_step import GPT, STAGES, accumulate, byte_gpt, piped
from bench.processes import Processes, Serve

CHUNKS = (4, 8)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
CHECKPOINTED = "gpipe, checkpointed"
BASE, WHOLE = "accumulated", "unpiped"
CANDIDATES = {f"gpt, {chunks} chunks": (BASE, WHOLE, CHECKPOINTED, *SCHEDULES) for chunks in CHUNKS}
QUICK = {"gpt, 8 chunks": (BASE, WHOLE, "1f1b")}
UNIT = "bytes"
CONDITIONS = {
    "model": GPT,
    "pipeline": f"{STAGES} stages, two threads",
    "memory": "peak of resident memory in a step over that at its start, when gradients exist",
}
SEPARATE = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}


def resident(field: str) -> int:
    """Bytes: ``"VmRSS"``, those of this process now, or ``"VmHWM"``, their peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def peak(work: Callable[[], Any]) -> float:
    """Bytes by which ``work`` went above what was resident before, at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # Lets the peak be what is resident now.
    before = resident("VmRSS")
    work()
    return float(resident("VmHWM") - before)


def _worker(rank: int, port: int, serve: Serve, candidate: str, chunks: int) -> None:
    task = module, x, y, loss_fn = byte_gpt()
    schedule: Any = candidate.partition(",")[0]
    checkpoint = "always" if candidate == CHECKPOINTED else "never"
    pipe = piped(module, chunks, checkpoint=checkpoint)

    def step() -> None:
        if candidate == BASE:
            accumulate(task, chunks)
        elif candidate == WHOLE:
            loss_fn(module(x), y).backward()
        else:
            pipe.train_step(x, y, loss_fn, schedule=schedule)

    def turn() -> float:
        pipe.zero_grad(set_to_none=False)
        return peak(step)

    torch.set_num_threads(2)
    serve(turn)


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Every schedule; processes inherit the environment that they are started in."""
    with mock.patch.dict(os.environ, SEPARATE):
        runners = {name: Processes(1, _worker, name, int(case.split()[1])) for name in names}
    return Turns(runners, 1 if options.quick else 3, 2 if options.quick else 9)
