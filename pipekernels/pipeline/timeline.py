"""Records when actions ran; measures bubbles, and exports them for trace viewers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipekernels.pipeline.schedule import Action, Program

Mark = Callable[[], float]
"""Says when a position in the order of issue was reached, in seconds of ``time.perf_counter``."""


def clock(stream: torch.cuda.Stream | None) -> Callable[[], Mark]:
    """A function that marks the present position in the order of issue to ``stream``; None is for
    work that is done when its call returns. Waits for the stream, to relate the device's time to
    the host's, as reading a mark does."""

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(event: torch.cuda.Event) -> float:
        event.synchronize()
        return begin + float(origin.elapsed_time(event)) * 1e-3

    if stream is None:
        return lambda: partial(float, time.perf_counter())
    origin = record()
    origin.synchronize()
    begin = time.perf_counter()
    return lambda: partial(seconds, record())


class Event(NamedTuple):
    """One action as it ran; times in seconds of a monotonic clock."""

    action: Action
    start: float
    end: float


class Phase(NamedTuple):
    """The actions of one forward, one backward, or one training step of a mini-batch."""

    program: Program
    events: list[Event]

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        starts, ends = [e.start for e in self.events], [e.end for e in self.events]
        return max(ends, default=0.0) - min(starts, default=0.0)


class Timeline:
    """Records the forwards and backwards of a pipe in ``with pipe.timeline() as timeline:``, except
    backwards of earlier forwards that have run all stages as one.

    For stages on CUDA devices it records the device's time, not the time of issue; the thread waits
    for the devices before and after each forward and backward. Copies between devices are not
    shown; a stage's time includes waiting for them.

    Attributes:
        phases: what was recorded.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def recorded(
        self, program: Program, clocks: Sequence[Callable[[], Mark]]
    ) -> Iterator[Callable[[Action], AbstractContextManager[None]]]:
        """Yield what makes, of each action of ``program``, a context that records it. ``clocks``:
        one per stage."""
        events: list[Event] = []
        self.phases.append(Phase(program, events))
        marks: list[tuple[Action, Mark, Mark]] = []

        # Marks are read when the phase has ended: reading one may wait for the device.
        @contextmanager
        def shown(action: Action) -> Iterator[None]:
            mark = clocks[action.stage]
            start = mark()
            yield
            marks.append((action, start, mark()))

        try:
            yield shown
        finally:
            events += [Event(action, start(), end()) for action, start, end in marks]

    @property
    def bubble(self) -> float:
        """Measured idle share of (lanes x makespan), over all phases, 0 to 1, without the time
        between phases."""
        capacity = sum(len(phase.program.lanes) * phase.makespan for phase in self.phases)
        busy = sum(e.end - e.start for phase in self.phases for e in phase.events)
        return 1.0 - busy / capacity if capacity > 0 else 0.0

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format that Perfetto and chrome://tracing read: a row per lane."""
        lanes = max((len(phase.program.lanes) for phase in self.phases), default=0)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": f"lane {i}"}}
            for i in range(lanes)
        ]
        events = [(phase.program, event) for phase in self.phases for event in phase.events]
        origin = min((event.start for _, event in events), default=0.0)
        for program, (action, start, end) in events:
            action_type, stage, micro_batch = action
            rows.append(
                {
                    "ph": "X",  # A complete event, with begin and duration, in microseconds.
                    "pid": 0,
                    "tid": program.lane_of[stage],
                    "name": f"{action_type}{micro_batch}",
                    "ts": (start - origin) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": stage, "micro_batch": micro_batch},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
