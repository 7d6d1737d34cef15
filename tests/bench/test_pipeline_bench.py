"""The benchmarks of pipes: checks of gradients, memory, recorded steps, and plots."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import python
from torch import nn

from bench.pipeline import memory, pipe, timeline, train_step

pytestmark = [pytest.mark.full, pytest.mark.project]

ROOT = Path(__file__).parents[2]


def test_wrong_gradients_are_refused() -> None:
    module = pipe.build(16)
    x, grad = pipe.data(16, 8)
    wanted = pipe.gradients(module, x, grad)
    pipe.step(module, x, grad, threads=torch.get_num_threads())()
    pipe.check(module.parameters(), wanted)
    with torch.no_grad():
        module[2].weight.grad *= 1.001
    with pytest.raises(AssertionError, match="gradients differ from the bare module's by 1.0e-03"):
        pipe.check(module.parameters(), wanted)
    module.zero_grad()
    with pytest.raises(AssertionError, match="a parameter has no gradient"):
        pipe.check(module.parameters(), wanted)


def test_a_schedule_is_not_timed_with_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> train_step.Task:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
        return module, torch.ones(8, 4), torch.ones(8, 4), nn.functional.mse_loss

    threads = torch.get_num_threads()
    try:
        found = train_step.candidates(make, 2)
        assert list(found) == list(train_step.CANDIDATES["wide, 8 chunks"])
        monkeypatch.setattr(train_step, "SCHEDULES", ("gpipe",))
        monkeypatch.setattr(train_step.Pipe, "train_step", lambda *args, **options: None)
        with pytest.raises(AssertionError, match="a parameter has no gradient"):
            train_step.candidates(make, 2)
    finally:
        torch.set_num_threads(threads)


def test_a_peak_counts_what_was_freed_in_between() -> None:
    """In a process of its own, as in the benchmark: other tests leave threads and garbage."""
    program = (
        "import torch; from bench.pipeline.memory import peak;"
        "print(peak(lambda: torch.ones(16 << 20)), peak(lambda: None))"
    )
    found, nothing = map(float, python("-c", program, cwd=ROOT).stdout.split())
    assert found > 60 << 20 and nothing < 8 << 20


def test_a_recorded_step_has_every_action_inside_its_time(one_thread: None) -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    piped = train_step.piped(module, 3, checkpoint="never")
    x = torch.randn(6, 8)
    steps: list[timeline.Step] = []

    def train() -> Any:
        return piped.train_step(x, x, nn.functional.mse_loss, schedule="1f1b")

    seconds = timeline.recorder(piped, train, steps)()
    (step,) = steps
    assert step.seconds == seconds
    actions = {(lane, kind, micro_batch) for lane, kind, micro_batch, _, _ in step.events}
    assert {action[0] for action in actions} == {0, 1}
    assert {(lane, m) for lane, kind, m in actions if kind == "F"} == {
        (lane, m) for lane in range(2) for m in range(3)
    }
    assert all(0 <= start <= end <= seconds for *_, start, end in step.events)


def row(case: str, candidate: str, median: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "candidate": candidate, "median": median, **more}


ROWS: dict[Any, list[dict[str, Any]]] = {
    memory: [row(case, name, 2e8) for case, names in memory.CANDIDATES.items() for name in names],
    timeline: [
        row(timeline.CASE, "one thread", 0.02),
        row(timeline.CASE, "pipekernels", 0.015, events=[[0, "F", 0, 0.0, 0.004]]),
    ],
}


@pytest.mark.parametrize("module", ROWS, ids=lambda module: module.__name__)
def test_plots_are_the_same_for_the_same_rows(module: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        module.plot(ROWS[module], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text().startswith("<?xml")
