"""Parameters of tests for two levels: a few in the gate, all of them in ``make test-all``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**values: Sequence[Any]) -> tuple[str, list[Any]]:
    """All combinations of ``values``, for ``pytest.mark.parametrize``.

    In the gate are as many as have every pair of values of two parameters; the others have the
    marker ``full``. Greedy, as in Cohen et al., The AETG System, IEEE TSE 23(7), 1997.
    """
    combined = list(product(*values.values()))
    pairs = {each: set(combinations(enumerate(each), 2)) for each in combined}
    missing: set[Any] = set().union(*pairs.values())
    gate = set()
    while missing:
        best = max(combined, key=lambda each: len(pairs[each] & missing))
        gate.add(best)
        missing -= pairs[best]
    marks = {False: (pytest.mark.full,), True: ()}
    return ",".join(values), [pytest.param(*each, marks=marks[each in gate]) for each in combined]
