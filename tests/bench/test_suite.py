"""Benchmarks as tests: what is measured when, what fails, what is kept, and what is printed."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.programs import python

from bench import __main__ as command
from bench import harness, registry, suite, test_benchmarks
from bench.conftest import Recorded
from bench.harness import Measured, Options, Plan, Turns

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
SAMPLES = {"theirs": [2.0, 6.0, 2.0, 2.0], "ours": [1.0, 2.0, 1.0, 4.0]}


def fake(fails_at: str | None = None, wrong: int = 0) -> Any:
    """A benchmark of two cases, which lists those that it has measured."""
    measured: list[str] = []

    def turns(case: str, names: Any, options: Options) -> Turns:
        measured.append(case)
        if case == fails_at:
            raise ValueError("no such library")
        runners = {name: lambda name=name: SAMPLES[name] for name in names}
        return Turns(runners, 0, 1, lambda medians: {"ours": {"wrong": wrong}})

    cases = dict.fromkeys(("small", "large"), ("theirs", "ours"))
    return SimpleNamespace(
        __doc__="What it measures.\n\nMore.", CANDIDATES=cases, QUICK=cases, BASE="theirs",
        CONDITIONS={"of": "a test"}, turns=turns, measured=measured,
    )  # fmt: skip


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A fake benchmark in the place of all others."""
    module = fake(**getattr(request, "param", {}))
    for place in (registry, suite):
        monkeypatch.setattr(place, "find", lambda name: module)
    return module


def suite_of(module: Any, told: list[str], *, cases: Any = None, **options: Any) -> suite.Suite:
    plan = {case: module.CANDIDATES[case] for case in cases or module.CANDIDATES}
    how = Options(options.get("quick", False))
    return suite.Suite({"fake": plan}, how, keep=options.get("keep", False), tell=told.append)


@pytest.mark.parametrize("name", registry.CPU)
def test_every_case_has_the_candidate_that_others_are_compared_with(name: str) -> None:
    module = registry.find(name)
    assert set(module.QUICK) <= set(module.CANDIDATES)
    for case, candidates in (*module.CANDIDATES.items(), *module.QUICK.items()):
        assert module.BASE in candidates
        assert set(candidates) <= set(module.CANDIDATES[case])
    assert module.CONDITIONS and (hasattr(module, "turns") or hasattr(module, "measure"))
    assert hasattr(test_benchmarks, f"test_{registry.operation(name)}")


def test_a_case_is_measured_when_it_is_asked_for_and_once(found: Any) -> None:
    told: list[str] = []
    cases = suite_of(found, told)
    assert cases.measured("fake", "small").samples == SAMPLES
    assert found.measured == ["small"]
    cases.measured("fake", "small")
    assert cases.measured("fake", "large").case == "large"
    assert found.measured == ["small", "large"]
    assert told[:3] == ["\nfake: What it measures.", "fake: small (1 of 2)", "fake: large (2 of 2)"]


def test_ratios_are_printed_with_their_spread(found: Any) -> None:
    told: list[str] = []
    suite_of(found, told, cases=["small"]).measured("fake", "small")
    header, theirs, ours = told[-1].strip().splitlines()
    assert header.split()[-6:] == ["theirs", "/", "it", "p10", "to", "p90"]
    assert theirs.split()[-4:] == ["1.00", "1.00", "to", "1.00"]
    assert ours.split()[-4:] == ["2.00", "0.95", "to", "2.70"]  # Of 2, 3, 2 and 0.5.


@pytest.mark.parametrize("found", [{"fails_at": "small"}], indirect=True)
def test_a_case_that_fails_says_so_to_each_candidate_and_stops_no_other(found: Any) -> None:
    cases = suite_of(found, [])
    for _ in range(2):
        with pytest.raises(ValueError, match="no such library"):
            cases.measured("fake", "small")
    assert cases.measured("fake", "large").samples == SAMPLES
    assert found.measured == ["small", "large"]


def test_cases_that_are_measured_together_say_when_they_were_not(found: Any) -> None:
    def measure(plan: Plan, options: Options) -> Iterator[Measured]:
        yield harness.measured("small", SAMPLES)

    found.measure = measure
    cases = suite_of(found, [])
    assert cases.measured("fake", "small").samples == SAMPLES
    with pytest.raises(RuntimeError, match="fake ended before this case"):
        cases.measured("fake", "large")


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"keep": True}, True), ({}, False), ({"keep": True, "quick": True}, False),
     ({"keep": True, "cases": ["small"]}, False)],
)  # fmt: skip
def test_a_result_file_holds_all_cases_or_is_not_written(
    found: Any, options: Any, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    cases = suite_of(found, [], **options)
    for case in options.get("cases", found.CANDIDATES):
        cases.measured("fake", case)
    path = tmp_path / "fake.json"
    assert path.exists() == kept
    if kept:
        rows = json.loads(path.read_text())["rows"]
        assert [row["case"] for row in rows] == ["small", "small", "large", "large"]
        assert [row["median"] for row in rows[:2]] == [2.0, 1.5]


def test_a_recorded_timer_repeats_samples() -> None:
    timer = Recorded()
    timer.load([1.5, 2.5])
    assert [timer(), timer(), timer(), timer()] == [0.0, 1.5, 0.0, 2.5]


@pytest.mark.parametrize("found", [{"wrong": 3}], indirect=True)
def test_a_candidate_with_wrong_results_fails(found: Any, request: pytest.FixtureRequest) -> None:
    test = test_benchmarks._test_of("fake")
    benchmark = mock.Mock(extra_info={})
    marked = mock.Mock(config=request.config)
    marked.node.get_closest_marker().kwargs = {"timer": Recorded()}
    test(marked, suite_of(found, []), benchmark, "small", "theirs")
    assert benchmark.pedantic.call_args.kwargs["rounds"] == 4
    assert benchmark.extra_info["theirs / it"]["median"] == 1.0
    with pytest.raises(AssertionError, match="ours summed 3 elements wrongly"):
        test(marked, suite_of(found, []), benchmark, "small", "ours")
    with pytest.raises(pytest.skip.Exception, match="absent is not installed"):
        test(marked, suite_of(found, []), benchmark, "small", "absent")


@pytest.mark.full
def test_all_reduce_alone_gives_groups_and_ratios_in_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--quick", "--benchmark-only", f"--benchmark-json={path}", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    selected = ["-m", "pytest", "bench", *options, "-k", "all_reduce and back"]
    run = python(*selected, cwd=ROOT, env=environment)
    assert "collectives: All-reduces from Python" in run.stdout and "Gloo / it" in run.stdout
    found = json.loads(path.read_text())["benchmarks"]
    assert {"ordinary", "symmetric", "Gloo"} <= {one["extra_info"]["candidate"] for one in found}
    for one in found:
        assert one["name"].startswith("test_all_reduce[back to back, 1024 bytes-")
        assert one["group"] == "all_reduce: back to back, 1024 bytes"
        ratio = one["extra_info"]["Gloo / it"]
        assert ratio["p10"] <= ratio["median"] <= ratio["p90"]
        assert one["stats"]["rounds"] == 2 and one["stats"]["min"] > 0


@pytest.mark.full
def test_the_command_runs_the_tests_of_the_named_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: calls.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["bench", "pipe", "collectives", "-k", "all_reduce"])
    assert command.main() == 0
    file = str(ROOT / "bench/test_benchmarks.py")
    assert calls[0][:2] == [f"{file}::test_pipe", f"{file}::test_all_reduce"]
    assert calls[0][-2:] == ["-k", "all_reduce"]
    monkeypatch.setattr(sys, "argv", ["bench", "nonsense", "--quick"])
    assert command.main() == 2 and len(calls) == 1
    assert "no benchmark nonsense; there are collectives, " in capsys.readouterr().err
