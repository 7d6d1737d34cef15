"""The choice between the ways follows the clock, also when it changes."""

from __future__ import annotations

import pytest

from pipekernels.pipeline.engine.pace import COST, RARELY, RECENT, Pace, Way

WAYS: list[Way] = ["inline", "threads", "split"]


def drive(pace: Pace, passes: int, seconds: dict[Way, float]) -> list[Way]:
    ways = []
    for _ in range(passes):
        way = pace.choose("key", WAYS)
        pace.record("key", way, seconds[way])
        ways.append(way)
    return ways


def test_the_first_pass_warms_up_inline_and_is_not_counted() -> None:
    pace = Pace()
    assert pace.is_new("key") and pace.choose("key", WAYS) == "inline"
    assert pace.is_new("key") and pace.choose("key", WAYS) == "inline"  # None has ended so far.
    assert pace.choose("other", WAYS[::-1]) == "inline"
    pace.record("key", "inline", 1e-9)
    assert not pace.is_new("key")
    ways = drive(pace, 3 * RECENT, {"inline": 2.0, "threads": 1.0, "split": 1.5})
    assert all(ways.count(way) == RECENT for way in WAYS)
    assert pace.choose("key", WAYS) == "threads"


def test_only_the_possible_ways_are_tried() -> None:
    pace = Pace()
    for _ in range(100):
        way = pace.choose("key", ["inline", "threads"])
        assert way in ("inline", "threads")
        pace.record("key", way, {"inline": 2.0, "threads": 1.0}[way])


@pytest.mark.parametrize("fastest", WAYS)
@pytest.mark.parametrize("ratio", [1.05, 2.0, 10.0])
def test_the_fastest_way_is_kept_and_trials_are_cheap(fastest: Way, ratio: float) -> None:
    pace = Pace()
    seconds = {way: 1.0 if way == fastest else ratio for way in WAYS}
    drive(pace, 1 + 3 * RECENT, seconds)
    passes = 10_000
    ways = drive(pace, passes, seconds)
    for slower in WAYS:
        if slower != fastest:
            trials = ways.count(slower)
            assert 1 <= trials <= passes / RARELY
            assert trials * (ratio - 1) <= passes * COST


def test_a_choice_made_under_load_is_mended() -> None:
    pace = Pace()
    drive(pace, 1 + 3 * RECENT, {"inline": 1.0, "threads": 1.5, "split": 1.5})
    ways = drive(pace, 200, {"inline": 1.0, "threads": 0.6, "split": 0.8})
    assert ways[0] == "inline" and ways[-1] == "threads"
    assert ways.count("inline") <= max(RARELY, 0.5 / COST) + 5
