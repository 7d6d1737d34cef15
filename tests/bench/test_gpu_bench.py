"""Benchmarks of `make gpu-check`, and the sanitizer's programs, on the CPU with tiny sizes."""

import contextlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import harness, registry, timing
from bench.gpu import __main__ as gpu
from bench.gpu import all_reduce, check, sanitized, sharded_gemm, threads
from bench.harness import Options, Turns
from bench.report import pages, tables

pytestmark = [pytest.mark.full, pytest.mark.project]

QUICK = Options(quick=True, seconds=60.0)
ON_ONE = [name for name in registry.GPU if name != "nccl"]


def rendered(name: str, rows: list[dict[str, Any]]) -> str:
    """The text of a result file on a page."""
    record = {
        "name": name,
        "date": "2026-01-31 12:00 UTC",
        "commit": "0123456789ab",
        "machine": {"gpu": "Some GPU", "cpu": "Some CPU", "cores": 16, "torch": "2.11.0"},
        "conditions": registry.find(name).CONDITIONS,
        "rows": rows,
    }
    page = pages.render([json.loads(json.dumps(record))])
    assert page.startswith("**Some GPU, Some CPU, 16 cores, torch 2.11.0**\n\n")
    assert "*2026-01-31 12:00 UTC, commit 0123456789ab. " in page
    return page


@pytest.mark.parametrize("name", ON_ONE)
def test_every_gpu_benchmark_runs_on_a_cpu(name: str) -> None:
    module = registry.find(name)
    rows = [row for found in gpu.run(module, QUICK) for row in found]
    assert rows and not any("error" in row for row in rows)
    page = rendered(name, rows)
    assert "|" in page or name == "gpu.soak"
    assert "Failed" not in page
    assert all(row.get("wrong", 0) == 0 for row in rows)


@pytest.mark.parametrize("name", ON_ONE)
def test_cases_name_the_candidate_that_others_are_compared_with(name: str) -> None:
    module = registry.find(name)
    bases = [module.BASE] if isinstance(module.BASE, str) else module.BASE
    for cases in (module.GPU, module.GPU_QUICK):
        found = [case for case, names in cases.items() if not set(bases) & set(names)]
        assert all(case.startswith(("Pipe", "device map")) for case in found), found


@pytest.mark.parametrize("part", sanitized.PARTS)
def test_programs_for_the_sanitizer_are_correct(part: str, device: torch.device) -> None:
    sanitized.PARTS[part](device)


def test_gemms_are_measured_in_order_of_importance() -> None:
    found = list(sharded_gemm.PRODUCTS.values())
    assert len(set(found)) == len(found) == 16 * 7 + 2 * 16 * 4  # Gradients from 256 tokens on.
    first = [(product.degree, product.tokens) for product in found[:32]]
    assert set(first) == {(8, 4096), (8, 16), (8, 1), (1, 4096)}


def test_rows_that_only_a_gpu_gives_are_on_the_page() -> None:
    def row(part: str, case: str, candidate: str, median: float, **more: Any) -> dict[str, Any]:
        figures = harness.summary([median] * 3)
        return {"part": part, "case": case, "candidate": candidate, **figures, **more}

    rows = [
        {"note": "Tuned: 70 shapes."},
        row("Large", "a", "triton", 2e-4, **{"TFLOP/s": 606.0, "error / cublas": 0.5}),
        row("Large", "a", "cublas", 3e-4, **{"TFLOP/s": 404.0, "error / cublas": 1.0}),
        {"case": "c", "error": "RuntimeError: no room"},
    ]
    page = rendered("gpu.sharded_gemm", rows)
    assert "| case; in brackets cublas / it | triton | cublas |" in page
    assert "| a | 200 us (1.50) | 300 us (1.00) |" in page
    assert "Tuned: 70 shapes." in page and "* c: RuntimeError: no room" in page
    line = tables.table(rows[1:2], [], "triton", columns=("TFLOP/s",)).splitlines()[-1]
    assert line == "| a | triton | 200 us | 200 us to 200 us | 1.00 | 606 |"


def do_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("at_once", [True, False])
def test_a_checker_that_runs_one_kernel_at_a_time_is_detected(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(record=do_nothing, synchronize=do_nothing, query=lambda: not at_once)
    streams = SimpleNamespace(
        Event=lambda: event, Stream=do_nothing, stream=contextlib.nullcontext,
        synchronize=do_nothing, _sleep=do_nothing,
    )  # fmt: skip
    monkeypatch.setattr(sanitized.torch, "cuda", streams)
    assert sanitized.side_by_side(torch.device("cuda")) == at_once


def test_a_step_names_what_a_checker_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "side_by_side", lambda device: False)
    sanitized.collectives(torch.device("cpu"))
    output = capsys.readouterr().out
    assert "1 ranks, ring" in output and "2 ranks" not in output
    command = [sys.executable, "-c", f"print({output!r})"]
    outcome = check.run_step("racecheck", command, {}, time.monotonic() + 30)
    assert outcome.good and outcome.note.startswith("kernels run one at a time here")


@pytest.mark.parametrize(("needed", "tries"), [(1, 1), (timing.HEAD_START * 4, 2)])
def test_device_time_is_measured_again_until_launches_were_ahead(
    needed: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device must sleep ``needed`` cycles for all launches to be queued in the meantime."""
    slept: list[int] = []
    event = SimpleNamespace(
        record=do_nothing, synchronize=do_nothing, query=lambda: slept[-1] < needed,
        elapsed_time=lambda end: 6.0,
    )  # fmt: skip
    gpu = SimpleNamespace(
        Event=lambda enable_timing: event, _sleep=slept.append, synchronize=do_nothing
    )
    monkeypatch.setattr(timing.torch, "cuda", gpu)
    calls: list[int] = []
    seconds = timing.device_seconds(lambda: calls.append(1), torch.device("cuda"), 3)
    assert seconds == pytest.approx(2e-3)
    assert len(calls) == 3 * tries and len(slept) == tries


@pytest.mark.parametrize(("needed", "tries", "late"), [(0, 1, 0), (1, 2, 0), (9, 3, 1)])
def test_collectives_are_timed_again_until_launches_were_ahead(
    needed: int, tries: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list(all_reduce.HEAD_STARTS)
    waited: list[int] = []

    def queue(
        calls: all_reduce.Calls, tensors: object, algorithm: str, count: int, cycles: int
    ) -> tuple[list[float], bool]:
        waited.append(cycles)
        return [float(len(waited))], waits.index(cycles) >= needed

    monkeypatch.setattr(all_reduce.Calls, "_queue", queue)
    with contextlib.closing(threads.Threads(2, torch.device("cpu"))) as ranks:
        calls = all_reduce.Calls(ranks, 64, torch.float32)
        assert calls.seconds("ordinary", "auto") == [tries]
    assert waited == waits[:tries] and calls.late == late


def test_cases_leave_time_for_those_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def turns(case: str, names: list[str], options: Options) -> Turns:
        clock[0] += 10.0
        return Turns({name: lambda: 1.0 for name in names}, 0, 2)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(all_reduce, "turns", turns)
    rows = [row for found in gpu.run(all_reduce, Options(seconds=200.0)) for row in found]
    cases = list(dict.fromkeys(row["case"].split()[0] for row in rows if "median" in row))
    assert cases == ["threads,", "processes,"]
    assert len({row["case"] for row in rows if row.get("case", "").startswith("threads")}) == 13
    page = rendered("gpu.all_reduce", rows)
    assert "17 cases are left out: there was no time for them." in page
    assert "it shares a GPU among ranks from 2.30.3 on." in page


def test_a_failing_case_has_a_row_and_is_in_the_table() -> None:
    def turns(case: str, names: list[str], options: Options) -> Turns:
        if case == "b":
            raise ValueError("no such case\nSearch for\nCompile with")
        return Turns({name: lambda: 1.0 for name in names}, 0, 2)

    module: Any = SimpleNamespace(GPU={"a": ["x"], "b": ["x"]}, turns=turns)
    rows = [row for found in gpu.run(module, Options()) for row in found]
    assert (rows[0]["case"], rows[0]["median"]) == ("a", 1.0)
    assert rows[1] == {"case": "b", "error": "ValueError: no such case"}
    assert tables.errors(rows) == "\n\nFailed:\n\n* b: ValueError: no such case"
    assert tables.errors(rows[:1]) == ""


def test_results_are_kept_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(case: str, options: Options) -> list[dict[str, Any]]:
        if case == "second":
            raise KeyboardInterrupt
        return [{"x": 1}]

    cases = {"first": (), "second": ()}
    module = SimpleNamespace(__doc__="What it does.", CONDITIONS={"a": 1}, rows=rows, GPU=cases)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu.registry, "find", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch"])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert json.loads((tmp_path / "gpu.micro_batch.json").read_text())["rows"] == [{"x": 1}]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "results on cpu mean nothing" in capsys.readouterr().err
