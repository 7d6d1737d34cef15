"""Timing of work on a device, and of the caller's wait for it.

Two clocks. *Device*: work is queued behind a kernel that only waits, and timed by events around it,
which excludes the cost of Python and of launches. *Call*: the caller's time until the device is
idle again, all costs included. On a CPU both are the caller's time, to test that a benchmark runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HEAD_START = 400_000  # cycles that the device waits while work is queued, about 200 us,
PER_WORK = 200_000  # plus about 100 us per repetition
SAMPLE = 1e-3  # least seconds of a sample; shorter work is repeated,
REPEATS = 100  # at most this often, as launches take the host longer than the device


def synchronize(device: torch.device) -> None:
    """Wait for all work on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(work: Callable[[], Any], device: torch.device, repeat: int = 1) -> float:
    """The caller's seconds per ``work``, from an idle device until it is idle again."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / repeat


def device_seconds(work: Callable[[], Any], device: torch.device, repeat: int = 1) -> float:
    """Seconds per ``work`` on the current stream, without launches. It must not wait for the
    device."""
    if device.type != "cuda":
        return call_seconds(work, device, repeat)
    cycles = HEAD_START + PER_WORK * repeat
    while True:
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(repeat):
            work()
        queued_in_time = not begin.query()
        end.record()
        end.synchronize()
        if queued_in_time or cycles > 1_000_000_000:
            return begin.elapsed_time(end) * 1e-3 / repeat
        cycles *= 4


def sampler(
    work: Callable[[], Any],
    device: torch.device,
    seconds: Callable[..., float] = device_seconds,
    sample: float = SAMPLE,
) -> Callable[[], float]:
    """A candidate for :func:`bench.harness.alternate`, warmed up, with enough repetitions for a
    sample of ``sample`` seconds."""
    seconds(work, device, 3)
    count = max(1, min(REPEATS, round(sample / max(seconds(work, device, 3), 1e-9))))
    return lambda: seconds(work, device, count)


class HostEvent:
    """A CUDA event's interface on the host's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this one to ``end``."""
        return (end._seconds - self._seconds) * 1e3


def events(device: torch.device, count: int) -> list[Any]:
    """Events that can be timed."""
    if device.type == "cuda":
        return [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    return [HostEvent() for _ in range(count)]


def bus(operation: str, ranks: int) -> float:
    """Gigabytes over the bus per gigabyte that a collective works on, as nccl-tests' PERFORMANCE.md
    has them."""
    others = (ranks - 1) / ranks
    return {"all_reduce": 2 * others, "broadcast": 1.0}.get(operation, others)
