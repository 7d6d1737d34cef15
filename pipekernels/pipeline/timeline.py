"""What really ran, when and on which stage: bubbles measured, drawn, and exported for trace
viewers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipekernels.pipeline.schedule import Action, Program


@dataclass(frozen=True)
class Event:
    """One action as it ran; times in seconds of a monotonic clock."""

    action: Action
    start: float
    end: float


@dataclass
class Phase:
    """The actions of one forward or one backward of a mini-batch."""

    stages: int
    events: list[Event]

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        if not self.events:
            return 0.0
        return max(e.end for e in self.events) - min(e.start for e in self.events)


class Timeline:
    """Records every forward and backward of a pipe inside ``with pipe.timeline() as timeline:``."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def recorded(
        self, compute: Callable[[Action, Any], Any], program: Program
    ) -> Callable[[Action, Any], Any]:
        """``compute``, which runs the actions of ``program`` on any thread, with a record of
        each."""
        phase = Phase(program.stages, [])
        self.phases.append(phase)

        def recording(action: Action, value: Any) -> Any:
            start = time.perf_counter()
            result = compute(action, value)
            phase.events.append(Event(action, start, time.perf_counter()))
            return result

        return recording

    @property
    def bubble(self) -> float:
        """Measured idle share of (stages x makespan), over all phases, 0 to 1. Time between phases
        is not counted."""
        capacity = sum(phase.stages * phase.makespan for phase in self.phases)
        busy = sum(e.end - e.start for phase in self.phases for e in phase.events)
        return 1.0 - busy / capacity if capacity > 0 else 0.0

    @property
    def ideal_bubble(self) -> float:
        """Idle share of the same schedule with equal stages: (p - 1) / (m + p - 1) (Huang et al.,
        2019)."""
        if not self.phases:
            return 0.0
        stages = self.phases[0].stages
        micro_batches = len(self.phases[0].events) // stages
        return (stages - 1) / (micro_batches + stages - 1)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format that chrome://tracing and Perfetto read; one row per stage,
        microseconds."""
        origin = min((e.start for phase in self.phases for e in phase.events), default=0.0)
        stages = max((phase.stages for phase in self.phases), default=0)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": s, "name": "thread_name", "args": {"name": f"stage {s}"}}
            for s in range(stages)
        ]
        for phase in self.phases:
            for e in phase.events:
                kind, stage, micro_batch = e.action
                rows.append(
                    {
                        "ph": "X",
                        "pid": 0,
                        "tid": stage,
                        "name": f"{kind}{micro_batch}",
                        "cat": "forward" if kind == "F" else "backward",
                        "ts": (e.start - origin) * 1e6,
                        "dur": (e.end - e.start) * 1e6,
                        "args": {"stage": stage, "micro_batch": micro_batch},
                    }
                )
        with open(path, "w") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)

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
                "drawing a timeline needs matplotlib, which is not installed; pip install matplotlib"
            ) from error
        stages = max((phase.stages for phase in self.phases), default=1)
        origin = min((e.start for phase in self.phases for e in phase.events), default=0.0)
        colours = {"F": "#4c78a8", "B": "#f58518", "idle": "#e8e8e8"}
        figure = Figure(figsize=(14, 1.4 + 0.7 * stages), layout="constrained")
        axes = figure.add_subplot()
        for phase in self.phases:
            if not phase.events:
                continue
            begin = (min(e.start for e in phase.events) - origin) * 1e3
            idle = [(begin, phase.makespan * 1e3)]
            for stage in range(phase.stages):
                axes.broken_barh(idle, (stage - 0.4, 0.8), color=colours["idle"])
            for e in phase.events:
                kind, stage, micro_batch = e.action
                left, width = (e.start - origin) * 1e3, (e.end - e.start) * 1e3
                axes.broken_barh(
                    [(left, width)],
                    (stage - 0.4, 0.8),
                    facecolor=colours[kind],
                    edgecolor="white",
                    linewidth=0.5,
                )
                axes.text(
                    left + width / 2, stage, str(micro_batch), ha="center", va="center", fontsize=7
                )
        axes.set_yticks(range(stages), [f"stage {s}" for s in range(stages)])
        axes.invert_yaxis()
        axes.set_xlabel("time (ms); numbers are micro-batches")
        axes.set_title(f"bubble {self.bubble:.1%} measured, {self.ideal_bubble:.1%} ideal")
        names = {"F": "forward", "B": "backward", "idle": "idle"}
        axes.legend(
            handles=[Patch(color=colours[key], label=name) for key, name in names.items()],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.35),
            ncols=3,
            frameon=False,
        )
        FigureCanvasAgg(figure).print_figure(os.fspath(path), dpi=130)
