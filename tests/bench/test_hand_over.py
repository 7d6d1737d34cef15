"""The benchmark of the host time of a hand-over."""

from __future__ import annotations

import pytest

from bench import hand_over

pytestmark = pytest.mark.full


def test_it_times_both_ways() -> None:
    found = list(hand_over.measure(hand_over.QUICK, quick=True))
    assert [case.case for case in found] == ["1 tensor", "8 tensors"]
    assert all(min(case.samples["edge"] + case.samples["torch"]) > 0 for case in found)
