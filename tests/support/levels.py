"""Which cases of a parametrized test the gate runs; the others have the marker ``full``."""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def in_gate(gate: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases``, of which those that are not in ``gate`` are left to ``make test-all``."""
    every = list(cases)
    assert all(case in every for case in gate), f"not all of {gate} are cases"
    return [case if case in gate else _full(case) for case in every]


def pairwise(**values: Sequence[Any]) -> tuple[str, list[Any]]:
    """All combinations of ``values``, for ``pytest.mark.parametrize``.

    In the gate are as many as have every pair of values of two parameters. Greedy, as in Cohen et
    al., The AETG System, IEEE TSE 23(7), 1997.
    """
    combined = list(product(*values.values()))
    pairs = {each: set(combinations(enumerate(each), 2)) for each in combined}
    missing: set[Any] = set().union(*pairs.values())
    gate = set()
    while missing:
        best = max(combined, key=lambda each: len(pairs[each] & missing))
        gate.add(best)
        missing -= pairs[best]
    return ",".join(values), in_gate(gate, combined)


def _full(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)  # A named one is one value.
    return pytest.param(*values, marks=pytest.mark.full)
