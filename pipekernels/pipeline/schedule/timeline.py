"""Records when actions ran; measures bubbles, draws them, and exports them for trace viewers."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pipekernels.pipeline.schedule.program import Action, ActionKind, Program

_COLOURS: dict[ActionKind, str] = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
_IDLE = "#e8e8e8"
_NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of parameters",
}


class Clock(Protocol):
    """Measures when work runs that is issued between two marks."""

    def mark(self) -> Any:
        """Mark the present position in the order of issue."""

    def seconds(self, mark: Any) -> float:
        """When ``mark`` was reached, in seconds of ``time.perf_counter``. May wait for that."""


class HostClock:
    """Clock for work that is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark


class StreamClock:
    """Clock for a CUDA stream's work. The constructor waits for the stream, to relate the device's
    time to the host's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._origin = self.mark()
        self._origin.synchronize()
        self._seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._seconds + milliseconds * 1e-3


class Event(NamedTuple):
    """One action as it ran; times in seconds of a monotonic clock."""

    action: Action
    start: float
    end: float


@dataclass
class Phase:
    """The actions of one forward, one backward, or one training step of a mini-batch."""

    program: Program
    events: list[Event] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.program.lanes)

    @property
    def kind(self) -> str:
        """``"forward"``, ``"backward"`` or ``"training step"``."""
        kinds = {action.kind == "F" for lane in self.program.lanes for action in lane}
        return "training step" if len(kinds) == 2 else "forward" if True in kinds else "backward"

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return 1 + max((a.micro_batch for lane in self.program.lanes for a in lane), default=-1)

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)


class Timeline:
    """Records the forwards of a pipe in ``with pipe.timeline() as timeline:``, and their backwards
    there.

    For stages on CUDA devices it records the device's time, not the time of issue; the thread waits
    for the devices before and after each forward and backward. Copies between devices are not
    shown; a stage's time includes waiting for them.

    Attributes:
        phases: what was recorded.
        is_recording: whether the body of that ``with`` runs, outside the body of an inner one.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.is_recording = False

    @contextmanager
    def recorded(
        self,
        compute: Callable[[Action, Any], Any],
        program: Program,
        clock_of: Callable[[int], Clock],
    ) -> Iterator[Callable[[Action, Any], Any]]:
        """Yield a version of ``compute`` that records each action of ``program``, on any thread;
        ``clock_of`` returns the clock of a stage."""
        phase = Phase(program)
        self.phases.append(phase)
        marks: list[tuple[Action, Any, Any]] = []

        def recording(action: Action, value: Any) -> Any:
            clock = clock_of(action.stage)
            start = clock.mark()
            result = compute(action, value)
            marks.append((action, start, clock.mark()))
            return result

        try:
            yield recording
        finally:
            for action, start, end in marks:
                clock = clock_of(action.stage)
                phase.events.append(Event(action, clock.seconds(start), clock.seconds(end)))

    @property
    def bubble(self) -> float:
        """Measured idle share of (lanes x makespan), over all phases, 0 to 1, without the time
        between phases."""
        capacity = sum(phase.lanes * phase.makespan for phase in self.phases)
        busy = sum(e.end - e.start for phase in self.phases for e in phase.events)
        return 1.0 - busy / capacity if capacity > 0 else 0.0

    def __str__(self) -> str:
        """A summary in one line."""
        if not self.phases:
            return "Timeline: nothing was recorded"
        kinds = Counter(phase.kind for phase in self.phases)
        passes = ", ".join(_plural(count, kind) for kind, count in kinds.items())
        stages = _range({phase.program.stages for phase in self.phases})
        micro_batches = _range({phase.micro_batches for phase in self.phases})
        milliseconds = sum(phase.makespan for phase in self.phases) * 1e3
        return (
            f"Timeline: {passes}; stages: {stages}, micro-batches: {micro_batches}; "
            f"{milliseconds:.3g} ms, utilisation {1 - self.bubble:.1%}"
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format that Perfetto and chrome://tracing read: a row per lane."""
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for lane, name in enumerate(self._lane_names())
        ]
        origin = self._start()
        for phase in self.phases:
            for action, start, end in phase.events:
                kind, stage, micro_batch = action
                rows.append(
                    {
                        "ph": "X",
                        "pid": 0,
                        "tid": phase.program.lane_of[stage],
                        "name": f"{kind}{micro_batch}",
                        "cat": _NAMES[kind],
                        "ts": (start - origin) * 1e6,
                        "dur": (end - start) * 1e6,
                        "args": {"stage": stage, "micro_batch": micro_batch},
                    }
                )
        Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw stages x time: forward, backward (with its recomputation) and idle.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise RuntimeError(
                "drawing a timeline needs matplotlib, which is not installed; pip install "
                "matplotlib"
            ) from error
        names = self._lane_names()
        origin = self._start()
        figure = Figure(figsize=(14, 1.4 + 0.7 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        seen: set[ActionKind] = set()
        for phase in self.phases:
            if not phase.events:
                continue
            begin = (min(e.start for e in phase.events) - origin) * 1e3
            idle = [(begin, phase.makespan * 1e3)]
            for lane in range(phase.lanes):
                axes.broken_barh(idle, (lane - 0.4, 0.8), color=_IDLE)
            for e in phase.events:
                kind, stage, micro_batch = e.action
                seen.add(kind)
                lane = phase.program.lane_of[stage]
                left, width = (e.start - origin) * 1e3, (e.end - e.start) * 1e3
                axes.broken_barh(
                    [(left, width)],
                    (lane - 0.4, 0.8),
                    facecolor=_COLOURS[kind],
                    edgecolor="white",
                    linewidth=0.5,
                )
                axes.text(
                    left + width / 2, lane, str(micro_batch), ha="center", va="center", fontsize=7
                )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("time (ms); numbers are micro-batches")
        axes.set_title(f"bubble {self.bubble:.1%}")
        legend = {_NAMES[kind]: colour for kind, colour in _COLOURS.items() if kind in seen}
        legend["idle"] = _IDLE
        axes.legend(
            handles=[Patch(color=colour, label=name) for name, colour in legend.items()],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.35),
            ncols=len(legend),
            frameon=False,
        )
        FigureCanvasAgg(figure).print_figure(os.fspath(path), dpi=130)

    def _start(self) -> float:
        return min((e.start for phase in self.phases for e in phase.events), default=0.0)

    def _lane_names(self) -> list[str]:
        """A name for each lane, from its stages."""
        stages: dict[int, set[int]] = {}
        for phase in self.phases:
            for stage, lane in phase.program.lane_of.items():
                stages.setdefault(lane, set()).add(stage)
        return ["stage " + ", ".join(map(str, sorted(stages[lane]))) for lane in sorted(stages)]


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"
