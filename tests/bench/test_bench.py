"""Benchmarks on CPU ranks: turns, what is kept, wrong results, and every program at small sizes."""

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import __main__ as bench
from bench import collectives, harness, records, registry
from bench.harness import Options, Turns
from bench.peers import groups
from bench.report import pages, summary

pytestmark = pytest.mark.project

WORK = "MLP on 16 rows"


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


@pytest.mark.parametrize(
    ("option", "broken", "wrong", "kept"),
    [([], None, 0, True), (["--quick"], None, 0, False), ([], "a", 0, False), ([], None, 3, False)],
)
def test_a_result_file_has_all_cases_or_is_not_written(
    option: list[str], broken: str | None, wrong: int, kept: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    samples = {"theirs": [2.0, 6.0, 2.0, 2.0], "ours": [1.0, 2.0, 1.0, 4.0]}

    def turns(case: str, names: Any, options: Options) -> Turns:
        if case == broken:
            raise ValueError("no such library")
        runners = {name: lambda name=name: samples[name] for name in names}
        return Turns(runners, 0, 1, lambda medians: {"ours": {"wrong": wrong}})

    plan = dict.fromkeys("ab", ("theirs", "ours"))
    module = SimpleNamespace(
        CANDIDATES=plan, QUICK=plan, BASE="theirs", CONDITIONS={"of": "a test"}, turns=turns
    )
    monkeypatch.setattr(registry, "find", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["bench", "engine", *option])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert bench.main() == int(bool(broken or wrong))
    printed = capsys.readouterr().out
    assert "| b | 2 s (1.00) | 1.5 s (1.33) |" in printed  # A case that fails stops no other.
    assert ("* a: ValueError: no such library" in printed) == bool(broken)
    assert (tmp_path / "engine.json").exists() == kept
    if kept:
        rows = json.loads((tmp_path / "engine.json").read_text())["rows"]
        medians = [(row["case"], row["candidate"], row["median"]) for row in rows]
        assert medians[:2] == [("a", "theirs", 2.0), ("a", "ours", 1.5)] and len(medians) == 4


def test_pages_are_those_of_the_result_files() -> None:
    assert not [page for page, text in pages.rewritten().items() if page.read_text() != text]


def test_results_of_uncommitted_changes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    (tmp_path / "here").mkdir()
    record = {"commit": "abc", "date": "today", "machine": {"cpu": "Z80", "cores": 1}, "rows": []}
    path = tmp_path / "here" / "engine.json"
    path.write_text(records.text_of(record))
    assert records.load("engine") == [record]
    path.write_text(records.text_of(record | {"commit": "abc+changes"}))
    with pytest.raises(ValueError, match=r"z80-1c/engine.json is of abc\+changes"):
        records.load("engine")


def test_tables_name_the_strongest_and_leave_machines_out_that_ran_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(line: summary.Line, cpu: str, factors: list[float]) -> dict[str, Any]:
        medians = {line.ours: 1.0, **dict(zip(line.instead, factors, strict=False))}
        rows = [{**line.where, "candidate": name, "median": s} for name, s in medians.items()]
        return {"name": line.name, "machine": {"cpu": cpu, "cores": 1}, "rows": rows}

    sums, mlp = (line for line in summary.LINES if line.work in ("all-reduce of 64 KiB", WORK))
    found = {
        sums.name: [
            record(sums, "Z80", [3.0, 2.0]),
            record(sums, "6502", [2.5, 5.0]),  # Medians with the next: 3 and 3.5.
            record(sums, "6800", [9.0]),
        ],
        mlp.name: [record(mlp, "Z80", [1.04, 2.0]), record(mlp, "6502", [0.5, 2.0])],
    }
    monkeypatch.setattr(records, "load", lambda name: found.get(name, []))
    first, second = list(sums.instead.values())[:2]
    wins = summary.table(won=True).splitlines()[2:]
    assert wins == [f"| {sums.work} | {first} | [3.0](docs/benchmarks/collectives.md) |"]
    assert second not in wins[0]
    losses = summary.table(won=False).splitlines()[2:]
    peer = next(iter(mlp.instead.values()))
    assert losses == [f"| {WORK} | {peer} | [0.77](docs/benchmarks/tensor_parallel.md) |"]
    found[mlp.name] += [record(mlp, "6800", [0.1, 0.1])]
    found["steps"] = [record(line, "Z80", [2.0]) for line in summary.LINES if line.name == "steps"]
    assert "6800" in summary.machines()
    del found[mlp.name][-1]
    found["memory"] = [
        record(line, "Z80", [2.0]) for line in summary.LINES if line.name == "memory"
    ]
    assert "6800" not in summary.machines() and "Z80" in summary.machines()


def test_readme_has_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, rows in ((2.0, 8), (0.5, 5)):
        by_peer = [{next(iter(line.instead)): {"Z80": ratio}} for line in summary.LINES]
        monkeypatch.setattr(summary, "ratios", lambda found=by_peer: found)
        assert len(summary.table(won=ratio > 1).splitlines()) == 2 + rows


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*registry.CPU} - {"collectives"}))
def test_programs_run_and_their_tables_are_made(name: str) -> None:
    """Of CPU ranks; test_gpu_check.py runs those for GPUs."""
    measured = bench.measured(name, Options(quick=True, seconds=60.0), print)
    rows = [row for found in measured for row in found]
    assert rows and not any("error" in row or row.get("wrong") for row in rows)
    machine = {"gpu": "Some GPU", "cpu": "Some CPU", "cores": 16, "torch": "2.11.0"}
    record: dict[str, Any] = {"name": name, "date": "today", "commit": "0", "machine": machine}
    record |= {"conditions": registry.find(name).CONDITIONS, "rows": rows}
    page = pages.render([json.loads(json.dumps(record))])
    assert "|" in page and "Failed" not in page


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
    plan = dict.fromkeys(cases, (*collectives.SUMS, *collectives.BOUNDS, "Gloo"))
    with groups.session(["absent", "broken", "pipekernels", "Gloo", "streaming"], 2) as session:
        assert list(session) == ["pipekernels", "Gloo", "streaming"]
        found = [row for rows in collectives.by_size(session, plan, quick=True) for row in rows]
        assert {row["candidate"] for row in found} == set(plan[cases[0]])
        assert {row["wrong"] for row in found} == {0}
        assert "| 65536 | float32 | " in pages.body("collectives", found)
        for pid in [answer["pid"] for answer in session["Gloo"][0].call("describe")]:
            os.kill(pid, 9)
        found = [row for rows in collectives.by_size(session, plan, quick=True) for row in rows]
        assert {row["candidate"] for row in found} == set(plan[cases[0]]) - {"Gloo"}
        with pytest.raises(groups.GroupError, match="(?s)pipekernels: .*KeyError: 'nonsense'"):
            session["pipekernels"][0].call("check", candidate="nonsense")
    printed = capsys.readouterr().out
    assert "absent is not installed" in printed and "no such library" in printed
    assert "Gloo: left out from here on" in printed
