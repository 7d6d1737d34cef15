"""Which cases of a parametrized test the gate runs; the others have the marker ``full``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_gate(gate: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases``, of which those that are not in ``gate`` are left to ``make test-all``."""
    every = list(cases)
    assert all(case in every for case in gate), f"not all of {gate} are cases"
    return [case if case in gate else _full(case) for case in every]


def _full(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
