"""``pytest bench``: every benchmark on pytest-benchmark, whose options it takes, and two more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import registry, suite
from bench.harness import Options, Plan

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmark")
    group.addoption(
        "--quick",
        action="store_true",
        help="few cases, candidates and rounds, in five minutes; no result file is written",
    )
    group.addoption(
        "--keep-results",
        action="store_true",
        help="write the result file of each benchmark whose cases were all measured",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A look at the ratios wants no second table of the same; a comparison is made in that table.
    if config.getoption("quick") and not config.getoption("benchmark_compare"):
        config.option.benchmark_quiet = True


class Recorded:
    """A timer for pytest-benchmark that repeats what was measured: 0, and then a sample."""

    __name__ = "recorded"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples: list[float]) -> None:
        """Repeat these, one per round."""
        self._readings = (reading for sample in samples for reading in (0.0, sample))

    def __call__(self) -> float:
        return next(self._readings)


def planned(name: str, quick: bool) -> Plan:
    """The candidates of each case."""
    module = registry.find(name)
    found: Plan = module.QUICK if quick else module.CANDIDATES
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each case and candidate."""
    name = metafunc.function.benchmark
    unit = registry.unit(name)
    what = registry.operation(name) if unit == "seconds" else f"{name} in {unit}, not seconds"
    metafunc.parametrize(
        ("case", "candidate"),
        [
            pytest.param(
                case,
                candidate,
                id=f"{case}-{candidate}",
                marks=pytest.mark.benchmark(timer=Recorded(), group=f"{what}: {case}"),
            )
            for case, candidates in planned(name, metafunc.config.getoption("quick")).items()
            for candidate in candidates
        ],
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let cases take as long as they do: peers and processes have their own limits."""
    for item in items:
        if HERE in item.path.parents and config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session")
def measuring(request: pytest.FixtureRequest) -> suite.Suite:
    """Measures the cases that were selected, each with all its candidates in turn."""
    quick = request.config.getoption("quick")
    plans: dict[str, dict[str, list[str]]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item.function, "benchmark"):
            name, case = item.function.benchmark, item.callspec.params["case"]
            plans.setdefault(name, {})[case] = list(planned(name, quick)[case])
    keep = request.config.getoption("keep_results")
    return suite.Suite(plans, Options(quick), keep=keep, tell=functools.partial(print, flush=True))
