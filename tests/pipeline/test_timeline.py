"""Timelines: recorded events, bubbles, and files."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import pipe_of
from torch import nn

from pipekernels.pipeline.schedule import Action, gpipe
from pipekernels.pipeline.timeline import Event, Phase, Timeline


def test_bubble_is_the_idle_share() -> None:
    timeline = Timeline()
    assert timeline.bubble == 0
    events = [
        Event(Action("F", 0, 0), 10, 11), Event(Action("F", 0, 1), 11, 12),
        Event(Action("F", 1, 0), 11, 12), Event(Action("F", 1, 1), 12, 13),
    ]  # fmt: skip
    timeline.phases.append(Phase(gpipe(2, 2).forwards, events))
    assert timeline.phases[0].makespan == 3
    assert timeline.bubble == pytest.approx(1 - 4 / 6)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_pipe_records_both_ways(checkpoint: Any, tmp_path: Path, device: torch.device) -> None:
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    pipe = pipe_of(*layers, device=device, chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 4, device=device)
    pipe(x).sum().backward()
    with pipe.timeline() as timeline:
        pipe(x).sum().backward()
    pipe(x)
    forward, backward = timeline.phases
    expected: list[tuple[Any, Any]] = [(forward, "F"), (backward, "B")]
    for phase, kind in expected:
        assert len(phase.program.lanes) == 2 and {e.action for e in phase.events} == {
            Action(kind, s, m) for s in range(2) for m in range(3)
        }
        assert all(e.start <= e.end for e in phase.events)
    assert 0 <= timeline.bubble < 1

    timeline.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in trace if row["ph"] == "M"}
    assert names == {0: "lane 0", 1: "lane 1"}
    spans = [row for row in trace if row["ph"] == "X"]
    assert len(spans) == 12 and min(row["ts"] for row in spans) == pytest.approx(0, abs=1)
    assert {(row["name"], row["tid"]) for row in spans} == {
        (f"{kind}{m}", s) for kind in "FB" for m in range(3) for s in range(2)
    }


def test_a_timeline_shows_the_time_of_the_device(device: torch.device) -> None:
    """An event lasts as long as the device works, not only as long as the launch takes."""

    def work(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.cuda._sleep(50_000_000)  # Clock cycles: at least 20 ms.
        else:
            time.sleep(0.02)
        return x

    pipe = pipe_of(FunctionLayer(work), nn.Identity(), device=device)
    with pipe.timeline() as timeline:
        pipe(torch.ones(2, 2, device=device))
    (phase,) = timeline.phases
    slow = [e.end - e.start for e in phase.events if e.action.stage == 0]
    assert len(slow) == 2 and min(slow) > 0.01
    assert phase.makespan >= sum(slow)


def test_nested_timelines_and_backwards_outside_of_the_block() -> None:
    pipe = pipe_of(nn.Linear(2, 2), nn.Linear(2, 2), chunks=1)
    with pipe.timeline() as outer:
        y = pipe(torch.ones(4, 2))
        with pipe.timeline() as inner:
            z = pipe(torch.ones(4, 2))
            y.sum().backward()
        z.sum().backward()
        assert [len(timeline.phases) for timeline in (outer, inner)] == [2, 2]
        w = pipe(torch.ones(4, 2))
    w.sum().backward()
    pipe(torch.ones(4, 2)).sum().backward()
    assert [len(timeline.phases) for timeline in (outer, inner)] == [3, 2]
