"""The benchmark of the host time of a hand-over."""

from __future__ import annotations

from bench import hand_over


def test_it_times_both_ways() -> None:
    rows = hand_over.measure(rounds=2)
    assert [row.tensors for row in rows] == list(hand_over.COUNTS)
    assert all(row.edge > 0 and row.torch > 0 for row in rows)
