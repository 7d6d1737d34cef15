"""Timing of work on a device, and of the caller's wait for it; cases that may fail.

Two clocks. *Device*: work is queued behind a kernel that only waits, and timed by events around it,
which excludes the cost of Python and of launches. *Call*: the caller's time until the device is
idle again, all costs included. On a CPU both are the caller's time, to test that a benchmark runs.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench import harness

Row = dict[str, Any]
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


def compare(
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    rounds: int,
    seconds: Callable[..., float] = device_seconds,
    sample: float = SAMPLE,
) -> dict[str, dict[str, float]]:
    """Summaries of all candidates, measured alternately."""
    ready = {name: sampler(work, device, seconds, sample) for name, work in candidates.items()}
    samples = harness.alternate(ready, warmup=1, rounds=rounds)
    return {name: harness.summary(times) for name, times in samples.items()}


def attempt(case: Mapping[str, Any], measure: Callable[[], Row]) -> Iterator[Row]:
    """One row: ``case`` with the result of ``measure``, or with the traceback of its error."""
    try:
        yield {**case, **measure()}
    except Exception:  # noqa: BLE001 - recorded in the result
        print(traceback.format_exc(), flush=True)
        yield {**case, "error": traceback.format_exc()}


def reason(error: str) -> str:
    """The error message of a traceback, without the further lines that CUDA adds."""
    lines = error.strip().splitlines()
    indented = [index for index, line in enumerate(lines) if line.startswith(" ")]
    return lines[indented[-1] + 1 if indented and indented[-1] + 1 < len(lines) else -1]


def errors(rows: list[Row], *keys: str) -> str:
    """Markdown lines about the cases that failed, named by these keys; empty if none failed."""
    lines = [
        f"* {', '.join(str(row[key]) for key in keys if key in row)}: {reason(row['error'])}"
        for row in rows
        if "error" in row
    ]
    return "\n\nFailed:\n\n" + "\n".join(lines) if lines else ""


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
