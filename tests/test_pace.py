"""The choice between inline and lanes follows the clock, also when it changes."""

from __future__ import annotations

import pytest

from pipekernels.pipeline.pace import COST, RARELY, RECENT, Pace


def drive(pace: Pace, passes: int, seconds: dict[str, float]) -> list[str]:
    ways = []
    for _ in range(passes):
        way = pace.choose("key")
        pace.record("key", way, seconds[way])
        ways.append(way)
    return ways


def test_the_first_pass_warms_up_inline_and_is_not_counted() -> None:
    pace = Pace()
    assert pace.is_new("key") and pace.choose("key") == "inline"
    assert not pace.is_new("key")
    pace.record("key", "inline", 1e-9)
    ways = drive(pace, 2 * RECENT, {"inline": 2.0, "lanes": 1.0})
    assert ways.count("inline") == ways.count("lanes") == RECENT
    assert pace.choose("key") == "lanes"


@pytest.mark.parametrize(("faster", "slower"), [("inline", "lanes"), ("lanes", "inline")])
@pytest.mark.parametrize("ratio", [1.05, 2.0, 10.0])
def test_the_faster_way_is_kept_and_trials_are_cheap(
    faster: str, slower: str, ratio: float
) -> None:
    pace = Pace()
    seconds = {faster: 1.0, slower: ratio}
    drive(pace, 1 + 2 * RECENT, seconds)
    passes = 10_000
    ways = drive(pace, passes, seconds)
    trials = ways.count(slower)
    assert 1 <= trials <= passes / RARELY
    assert trials * (ratio - 1) <= passes * COST


def test_a_choice_made_under_load_is_mended() -> None:
    pace = Pace()
    drive(pace, 1 + 2 * RECENT, {"inline": 1.0, "lanes": 1.5})
    ways = drive(pace, 100, {"inline": 1.0, "lanes": 0.6})
    assert ways[0] == "inline" and ways[-1] == "lanes"
    assert ways.count("inline") <= max(RARELY, 0.5 / COST) + 5
