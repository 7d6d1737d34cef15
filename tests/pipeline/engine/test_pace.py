"""The choice of the execution follows measured times, also when they change."""

from __future__ import annotations

from typing import Any

import pytest

from pipekernels.pipeline.engine.pace import COST, RARELY, RECENT, Pace

EXECUTIONS: list[Any] = ["inline", "threads", "split"]


def run_passes(pace: Pace, passes: int, seconds: dict[Any, float]) -> list[str]:
    """The executions that ``pace`` chooses for so many passes."""
    chosen = []
    for _ in range(passes):
        execution = pace.choose("key", EXECUTIONS)
        pace.record("key", execution, seconds[execution])
        chosen.append(execution)
    return chosen


def test_the_first_pass_warms_up_inline_and_is_not_counted() -> None:
    pace = Pace()
    assert pace.is_new("key") and pace.choose("key", EXECUTIONS) == "inline"
    assert pace.is_new("key") and pace.choose("key", EXECUTIONS) == "inline"  # None has ended.
    assert pace.choose("other", EXECUTIONS[::-1]) == "inline"
    pace.record("key", "inline", 1e-9)
    assert not pace.is_new("key")
    chosen = run_passes(pace, 3 * RECENT, {"inline": 2.0, "threads": 1.0, "split": 1.5})
    assert all(chosen.count(execution) == RECENT for execution in EXECUTIONS)
    assert pace.choose("key", EXECUTIONS) == "threads"


def test_only_possible_executions_are_tried() -> None:
    pace = Pace()
    for _ in range(100):
        execution = pace.choose("key", ["inline", "threads"])
        assert execution in ("inline", "threads")
        pace.record("key", execution, {"inline": 2.0, "threads": 1.0}[execution])


@pytest.mark.parametrize("fastest", EXECUTIONS)
@pytest.mark.parametrize("ratio", [1.05, 2.0, 10.0])
def test_the_fastest_execution_is_kept_and_trials_are_cheap(fastest: str, ratio: float) -> None:
    pace = Pace()
    seconds = {execution: 1.0 if execution == fastest else ratio for execution in EXECUTIONS}
    run_passes(pace, 1 + 3 * RECENT, seconds)
    passes = 10_000
    chosen = run_passes(pace, passes, seconds)
    for slower in EXECUTIONS:
        if slower != fastest:
            trials = chosen.count(slower)
            assert 1 <= trials <= passes / RARELY
            assert trials * (ratio - 1) <= passes * COST


def test_a_choice_made_under_load_is_corrected() -> None:
    pace = Pace()
    run_passes(pace, 1 + 3 * RECENT, {"inline": 1.0, "threads": 1.5, "split": 1.5})
    chosen = run_passes(pace, 200, {"inline": 1.0, "threads": 0.6, "split": 0.8})
    assert chosen[0] == "inline" and chosen[-1] == "threads"
    assert chosen.count("inline") <= max(RARELY, 0.5 / COST) + 5
