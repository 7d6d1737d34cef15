"""Benchmarks on CPU ranks: turns, what is kept, wrong results, and every program at small sizes."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.programs import python
from torch import nn

from bench import collectives, harness, registry, suite, tensor_parallel, test_benchmarks
from bench.conftest import Recorded
from bench.distributed import ddp
from bench.harness import Options, Turns
from bench.peers import groups
from bench.pipeline import pipe
from bench.report import pages

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
SAMPLES = {"theirs": [2.0, 6.0, 2.0, 2.0], "ours": [1.0, 2.0, 1.0, 4.0]}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("names", ["abcdef", "abcde"])
def test_each_candidate_follows_every_other_one_equally_often(names: str, calls: int) -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [1.0, 2.0]  # A turn may give several samples.

    turns = {name: lambda name=name: turn(name) for name in names}
    rounds = 2 * len(names) // calls
    for call in range(calls):
        samples = harness.alternate(turns, warmup=0, rounds=rounds, start=call * rounds)
        assert samples == dict.fromkeys(names, [1.0, 2.0] * rounds)
    by_round = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(each) == list(names) for each in by_round)
    neighbours = [pair for each in by_round for pair in itertools.pairwise(each)]
    assert sorted(neighbours) == sorted([*itertools.permutations(names, 2)] * 2)


# ---- cases, and what is kept of them ----


@pytest.mark.parametrize("name", registry.CPU)
def test_every_case_has_the_candidate_that_others_are_compared_with(name: str) -> None:
    module = registry.find(name)
    assert set(module.QUICK) <= set(module.CANDIDATES)
    for case, candidates in (*module.CANDIDATES.items(), *module.QUICK.items()):
        assert module.BASE in candidates
        assert set(candidates) <= set(module.CANDIDATES[case])
    assert module.CONDITIONS and hasattr(test_benchmarks, f"test_{registry.operation(name)}")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark in the place of all others, whose case ``broken`` fails."""

    def turns(case: str, names: Any, options: Options) -> Turns:
        module.measured.append(case)
        if case == "broken":
            raise ValueError("no such library")
        runners = {name: lambda name=name: SAMPLES[name] for name in names}
        return Turns(runners, 0, 1, lambda medians: {"ours": {"wrong": module.wrong}})

    module = SimpleNamespace(
        __doc__="What it measures.", CANDIDATES=dict.fromkeys(("a", "b"), ("theirs", "ours")),
        BASE="theirs", CONDITIONS={"of": "a test"}, turns=turns, measured=[], wrong=0,
    )  # fmt: skip
    for place in (registry, suite):
        monkeypatch.setattr(place, "find", lambda name: module)
    return module


def suite_of(cases: Any, *, keep: bool = False, quick: bool = False) -> suite.Suite:
    plan = dict.fromkeys(cases, ("theirs", "ours"))
    return suite.Suite({"fake": plan}, Options(quick), keep=keep, tell=lambda text: None)


def test_a_case_is_measured_once_and_one_that_fails_stops_no_other(found: Any) -> None:
    cases = suite_of(["a", "broken", "b"])
    for _ in range(2):
        assert cases.measured("fake", "a").samples == SAMPLES
        with pytest.raises(ValueError, match="no such library"):
            cases.measured("fake", "broken")
    assert cases.measured("fake", "b").case == "b"
    assert found.measured == ["a", "broken", "b"]


@pytest.mark.parametrize(
    ("cases", "options", "kept"),
    [("ab", {"keep": True}, True), ("ab", {}, False), ("a", {"keep": True}, False),
     ("ab", {"keep": True, "quick": True}, False)],
)  # fmt: skip
def test_a_result_file_holds_all_cases_or_is_not_written(
    found: Any, cases: str, options: Any, kept: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    measuring = suite_of(cases, **options)
    for case in cases:
        measuring.measured("fake", case)
    path = tmp_path / "fake.json"
    assert path.exists() == kept
    if kept:
        rows = json.loads(path.read_text())["rows"]
        assert [(row["case"], row["median"]) for row in rows] == [
            ("a", 2.0), ("a", 1.5), ("b", 2.0), ("b", 1.5)
        ]  # fmt: skip


def test_a_candidate_with_wrong_results_fails(found: Any, request: pytest.FixtureRequest) -> None:
    found.wrong = 3
    test = test_benchmarks._test_of("fake")
    benchmark = mock.Mock(extra_info={})
    marked = mock.Mock(config=request.config)
    timer = marked.node.get_closest_marker().kwargs = {"timer": Recorded()}
    test(marked, suite_of("a"), benchmark, "a", "theirs")
    assert [timer["timer"]() for _ in range(4)] == [0.0, 2.0, 0.0, 6.0]
    assert benchmark.extra_info["theirs / it"]["median"] == 1.0
    with pytest.raises(AssertionError, match="ours summed 3 elements wrongly"):
        test(marked, suite_of("a"), benchmark, "a", "ours")


def test_pages_are_those_of_the_result_files() -> None:
    assert not [page for page, text in pages.rewritten().items() if page.read_text() != text]
    with pytest.raises(ValueError, match="make bench ARGS=x"):
        pages.update("<!-- bench:x -->\nold\n<!-- /bench -->", {})
    unmeasured = "<!-- bench:gpu.x -->\nold\n<!-- /bench -->"
    assert pages.update(unmeasured, {}) == unmeasured.replace("old", pages.UNMEASURED)


# ---- programs at small sizes ----


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in registry.CPU if name != "collectives"])
def test_every_program_runs_and_its_table_is_made(name: str) -> None:
    module = registry.find(name)
    case, names = next(iter(module.QUICK.items()))
    (found,) = harness.measure(module, {case: names}, Options(quick=True))
    assert module.BASE in found.samples and not any(row.get("wrong") for row in found.rows)
    machine = {"cpu": "some", "cores": 2, "torch": "2"}
    record = {"name": name, "date": "today", "commit": "0", "machine": machine}
    page = pages.render([record | {"conditions": module.CONDITIONS, "rows": found.rows}])
    assert f"| {case} | {module.BASE} | " in page


@pytest.mark.full
def test_the_command_gives_groups_and_ratios_in_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    options = ["--quick", f"--benchmark-json={path}", "-p", "no:cacheprovider", "-k", "back"]
    run = python("-m", "bench", "collectives", *options, cwd=ROOT, env=environment)
    assert "collectives: All-reduces from Python" in run.stdout and "Gloo / it" in run.stdout
    found = json.loads(path.read_text())["benchmarks"]
    assert {"ordinary", "symmetric", "Gloo"} <= {one["extra_info"]["candidate"] for one in found}
    for one in found:
        assert one["group"] == "all_reduce: back to back, 1024 bytes"
        ratio = one["extra_info"]["Gloo / it"]
        assert ratio["p10"] <= ratio["median"] <= ratio["p90"] and one["stats"]["min"] > 0
    unknown = python("-m", "bench", "nonsense", code=2, cwd=ROOT)
    assert "no benchmark nonsense; there are collectives, " in unknown.stderr


@pytest.mark.full
def test_collectives_are_checked_and_what_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such library\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setitem(groups.PYTHONS, "broken", broken)
    monkeypatch.setitem(groups.PYTHONS, "absent", tmp_path / "absent")
    cases = [f"{dtype}, 65536 bytes" for dtype in collectives.DTYPES]
    plan = dict.fromkeys(cases, (*collectives.SUMS, "Gloo"))
    with groups.session(["absent", "broken", "pipekernels", "Gloo"], 2) as session:
        assert list(session) == ["pipekernels", "Gloo"]
        for measured in collectives.by_size(session, plan, quick=True):
            assert set(measured.samples) == {*collectives.SUMS, "Gloo"}
            assert {row["wrong"] for row in measured.rows} == {0}
        for pid in [answer["pid"] for answer in session["Gloo"][0].call("describe")]:
            os.kill(pid, 9)
        for measured in collectives.by_size(session, plan, quick=True):
            assert "Gloo" not in measured.samples
        with pytest.raises(groups.GroupError, match="(?s)pipekernels: .*KeyError: 'nonsense'"):
            session["pipekernels"][0].call("check", candidate="nonsense")
    printed = capsys.readouterr().out
    assert "absent is not installed" in printed and "no such library" in printed
    assert "Gloo: left out from here on" in printed


# ---- wrong candidates are refused before they are timed ----


def test_wrong_gradients_are_refused() -> None:
    module = pipe.build(16)
    x, grad = pipe.data(16, 8)
    wanted = pipe.gradients(module, x, grad)
    pipe.step(module, x, grad, threads=torch.get_num_threads())()
    pipe.check(module.parameters(), wanted)
    with torch.no_grad():
        module[2].weight.grad *= 1.001
    with pytest.raises(AssertionError, match="gradients differ from the bare module's by 1.0e-03"):
        pipe.check(module.parameters(), wanted)
    module.zero_grad()
    with pytest.raises(AssertionError, match="a parameter has no gradient"):
        pipe.check(module.parameters(), wanted)


@pytest.mark.full
@pytest.mark.parametrize("case", tensor_parallel.CASES)
def test_wrong_layers_are_refused(case: str) -> None:
    turns, threads = list[float](), torch.get_num_threads()
    module = tensor_parallel.build()
    tensor_parallel.serve_steps(module, case, lambda turn: turns.append(turn()), threads)
    with torch.no_grad():
        module[2].weight[0] *= 1.01
    with pytest.raises(AssertionError):
        tensor_parallel.serve_steps(module, case, lambda turn: turns.append(turn()), threads)
    assert len(turns) == 1


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ddp, "BLOCKS", 1)
    monkeypatch.setattr(ddp, "WIDTH", 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.full
def test_wrong_losses_are_refused(group_of_one: None) -> None:
    case = "4 sequences"
    ddp.check_losses(ddp.stepper(ddp.build(), *ddp.data(case)), case)
    module: nn.Module = ddp.build()
    for parameter in module.parameters():  # As if no gradients were averaged.
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(AssertionError, match="not close"):
        ddp.check_losses(ddp.stepper(module, *ddp.data(case)), case)
