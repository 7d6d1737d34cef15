"""A test function for each benchmark, ``test_<operation>``, with a test per case and candidate.

All candidates of a case are measured in turn when the first of its tests runs. Each test then hands
its candidate's samples to pytest-benchmark, and fails if sums were wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench import harness, registry, suite


def _test_of(name: str) -> Callable[..., None]:
    def test(
        request: pytest.FixtureRequest,
        measuring: suite.Suite,
        benchmark: Any,
        case: str,
        candidate: str,
    ) -> None:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            found = measuring.measured(name, case)
        if candidate not in found.samples:
            pytest.skip(f"{candidate} is not installed, or has failed: left out of {case}")
        samples, base = found.samples[candidate], registry.find(name).BASE
        wrong = sum(r.get("wrong", 0) for r in found.rows if r.get("candidate") == candidate)
        assert not wrong, f"{candidate} summed {wrong} elements wrongly"
        benchmark.extra_info |= {"case": case, "candidate": candidate, "unit": registry.unit(name)}
        if base in found.samples:
            ratio = harness.ratios(samples, found.samples[base])
            benchmark.extra_info[f"{base} / it"] = {k: ratio[k] for k in ("median", "p10", "p90")}
        request.node.get_closest_marker("benchmark").kwargs["timer"].load(samples)
        benchmark.pedantic(lambda: None, rounds=len(samples))

    test.benchmark = name  # type: ignore[attr-defined]
    return test


for _name in registry.CPU:
    globals()[f"test_{registry.operation(_name)}"] = _test_of(_name)
