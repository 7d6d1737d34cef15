"""The benchmarks of pipes: checks of gradients, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import decode
from bench.pipeline import pipe, train_step

pytestmark = pytest.mark.project


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


def row(case: str, candidate: str, median: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "candidate": candidate, "median": median, **more}


ROWS: dict[Any, list[dict[str, Any]]] = {
    train_step: [
        row(case, name, 1.0, chunks=int(case.split()[1]), **{"speed-up over sequential": 1.5})
        for case, names in train_step.CANDIDATES.items()
        for name in names[1:]
    ],
    decode: [row(case, name, 0.02) for case, names in decode.CANDIDATES.items() for name in names],
}


@pytest.mark.parametrize("module", ROWS, ids=lambda module: module.__name__)
def test_plots_are_the_same_for_the_same_rows(module: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        module.plot(ROWS[module], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text().startswith("<?xml")
