"""Memory that a training step takes on CPU stages: how far resident memory rises at its peak."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from demo.gpt import VOCABULARY
from demo.model import CHUNKS, SCHEDULE, new_model, new_pipe, token_loss
from demo.ranks import processes
from demo.sizes import Sizes

UNPIPED, ACCUMULATED = "unpiped, whole batch", "unpiped, accumulated"
PIPED = f"Pipe, {SCHEDULE}"
ROUNDS = 3
# From malloc.h. Tensors of 64 KiB or more get pages that are unmapped when they are freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SEPARATE_PAGES = 64 << 10


def measure(sizes: Sizes) -> dict[str, float]:
    """MiB above parameters and gradients, of each in a new process."""
    peaks = {}
    for name in (UNPIPED, ACCUMULATED, PIPED):
        with processes(1, _prepare, sizes, name) as turn:
            peaks[name] = median(turn()[0] for _ in range(ROUNDS))
    return peaks


def _prepare(rank: int, sizes: Sizes, name: str) -> Callable[[], float]:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, SEPARATE_PAGES)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    model = new_model(sizes)
    pipe = new_pipe(model, ["cpu", "cpu"])
    x, y = torch.randint(VOCABULARY, (2, sizes.batch, sizes.context))

    def step() -> None:
        if name == UNPIPED:
            token_loss(model(x), y).backward()
        elif name == ACCUMULATED:
            for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
                (token_loss(model(part), target) * (len(part) / len(x))).backward()
        else:
            pipe.train_step(x, y, token_loss, schedule=SCHEDULE)

    def turn() -> float:
        pipe.zero_grad(set_to_none=False)
        Path("/proc/self/clear_refs").write_text("5")  # The peak is now what is resident.
        before = _resident("VmRSS")
        step()
        return (_resident("VmHWM") - before) / 1024

    step()  # Makes gradients, which are not counted.
    return turn


def _resident(field: str) -> int:
    """KiB, at present (``"VmRSS"``) or at the peak (``"VmHWM"``)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])
