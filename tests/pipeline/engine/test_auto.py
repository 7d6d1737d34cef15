"""The choice of the execution follows measured times, also when they change, and is logged."""

import logging

import pytest

from pipekernels.pipeline.engine.auto import (
    FIRST,
    MIN_RUNS_BETWEEN_TRIALS,
    SAMPLES_KEPT,
    TRIAL_TIME_SHARE,
    Auto,
    Signature,
)
from pipekernels.pipeline.schedule.program import GPIPE

EXECUTIONS = ["inline", "threads", "split"]
EXPLORATION = 1 + 3 * SAMPLES_KEPT
KIND = "gpipe of 2 micro-batches of less than 2**4 elements, with gradients, 0 recomputed"


def make(*, trains: bool = False) -> Auto:
    """With all executions to choose from; ``trains``: without split backwards."""
    return Auto(Signature(GPIPE, 2, 4, True, (True,), 0, trains))


def run(auto: Auto, times: int, **seconds: float) -> list[str]:
    """The executions that ``auto`` chooses for so many mini-batches."""
    chosen = []
    for _ in range(times):
        execution = auto.choose()
        auto.record(execution, seconds.get(execution, 1e-9))
        chosen.append(execution)
    return chosen


def test_the_first_mini_batch_warms_up_and_is_not_counted() -> None:
    auto = make()
    assert auto.choose() == FIRST
    assert auto.choose() == FIRST  # None has ended.
    auto.record(FIRST, 1e-9)
    chosen = run(auto, 3 * SAMPLES_KEPT, inline=2.0, threads=1.0, split=1.5)
    assert all(chosen.count(execution) == SAMPLES_KEPT for execution in EXECUTIONS)
    assert auto.choose() == "threads"


def test_only_possible_executions_are_tried() -> None:
    chosen = run(make(trains=True), 100, inline=2.0, threads=1.0)
    assert set(chosen) == {FIRST, "inline", "threads"}


@pytest.mark.parametrize("fastest", EXECUTIONS)
@pytest.mark.parametrize("ratio", [1.05, 2.0, 10.0])
def test_the_fastest_execution_is_kept_and_trials_are_cheap(fastest: str, ratio: float) -> None:
    auto = make()
    seconds = {execution: 1.0 if execution == fastest else ratio for execution in EXECUTIONS}
    run(auto, EXPLORATION, **seconds)
    times = 10_000
    chosen = run(auto, times, **seconds)
    for slower in EXECUTIONS:
        if slower != fastest:
            trials = chosen.count(slower)
            assert 1 <= trials <= times / MIN_RUNS_BETWEEN_TRIALS
            assert trials * (ratio - 1) <= times * TRIAL_TIME_SHARE


def test_a_choice_made_under_load_is_corrected() -> None:
    auto = make()
    run(auto, EXPLORATION, inline=1.0, threads=1.5, split=1.5)
    chosen = run(auto, 200, inline=1.0, threads=0.6, split=0.8)
    assert chosen[0] == "inline" and chosen[-1] == "threads"
    assert chosen.count("inline") <= max(MIN_RUNS_BETWEEN_TRIALS, 0.5 / TRIAL_TIME_SHARE) + 5


def test_a_choice_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipekernels.pipeline")
    auto = make(trains=True)
    run(auto, 1 + 2 * SAMPLES_KEPT, inline=2e-3, threads=1e-3)
    assert not caplog.messages
    run(auto, 20, inline=2e-3, threads=1e-3)
    assert caplog.messages == [f"{KIND}: threads, the fastest (inline 2 ms, threads 1 ms)"]
    run(auto, 1000, inline=2e-3, threads=3e-3)
    assert caplog.messages[1:] == [f"{KIND}: inline, the fastest (inline 2 ms, threads 3 ms)"]
