"""Benchmarks of `make gpu-check`, and the sanitizer's programs, on the CPU with tiny sizes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import harness
from bench.gpu import __main__ as gpu
from bench.gpu import all_reduce, sanitized, sharded_gemm, steps, timing
from bench.report import pages

pytestmark = [pytest.mark.full, pytest.mark.project]


def rendered(name: str, rows: list[timing.Row]) -> str:
    """The text of a result file on a page."""
    record = {
        "name": f"gpu.{name}",
        "date": "2026-01-31 12:00 UTC",
        "commit": "0123456789ab",
        "machine": {"gpu": "Some GPU", "cpu": "Some CPU", "cores": 16, "torch": "2.11.0"},
        "conditions": importlib.import_module(f"bench.gpu.{name}").CONDITIONS,
        "rows": rows,
    }
    page = pages.render([json.loads(json.dumps(record))])
    assert page.startswith("**Some GPU, Some CPU, 16 cores, torch 2.11.0**\n\n")
    assert "*2026-01-31 12:00 UTC, commit 0123456789ab. " in page
    return page


@pytest.mark.parametrize("name", gpu.NAMES)
def test_every_gpu_benchmark_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"bench.gpu.{name}")
    args = argparse.Namespace(quick=True, device=torch.device("cpu"), seconds=60.0)
    rows = list(module.run(args))
    assert rows and not any("error" in row for row in rows)
    page = rendered(name, rows)
    assert "|" in page and "Failed" not in page
    assert all(row.get("wrong", 0) == 0 for row in rows)
    assert module.CONDITIONS
    if hasattr(module, "plot"):
        pytest.importorskip("matplotlib")
        module.plot(rows, tmp_path / "plot.svg")
        assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("part", sanitized.PARTS)
def test_programs_for_the_sanitizer_are_correct(part: str, device: torch.device) -> None:
    sanitized.PARTS[part](device)


def test_gemms_are_measured_in_order_of_importance() -> None:
    found = list(sharded_gemm.products(quick=False))
    assert len(set(found)) == len(found) == 16 * 7 + 2 * 16 * 4  # Gradients from 256 tokens on.
    first = [(product.degree, product.tokens) for product in found[:32]]
    assert set(first) == {(8, 4096), (8, 16), (8, 1), (1, 4096)}


def test_tables_of_rows_that_only_a_gpu_gives(tmp_path: Path) -> None:
    product = sharded_gemm.Product("Llama-7B", "o_proj", 8, "forward", 256, 256, 4096, 512)
    seconds = {
        "product": 2e-4,
        "all-reduce": 1e-4,
        "one after the other": 3e-4,
        "overlapped": 2.1e-4,
    }
    rows: list[timing.Row] = [
        {"part": "tuning", "shapes": 70, "faster": 50, "launch": 4e-5},
        {
            "part": "product",
            **product._asdict(),
            "ways": {},
            "TFLOP/s": {"auto": 606.0, "triton": 606.0, "cublas": 600.0},
            "errors": {"auto": 1e-3, "triton": 1e-3, "cublas": 2e-3},
        },
        {"part": "left out", "products": 12},
        {
            "part": "overlap",
            "tokens": 2048,
            "ways": {name: harness.summary([time] * 3) for name, time in seconds.items()},
            "reducing blocks": 8,
            "wrong": 0,
            "over the slower": 1.05,
            "slow-down": 1.02,
        },
        {"part": "overlap", "tokens": 8192, "error": "Traceback\nRuntimeError: no room"},
    ]
    page = rendered("sharded_gemm", rows)
    for text in (
        "| Llama-7B | o_proj | 8 | forward | 256 | 606.0 | 606.0 | 600.0 | 1.01 | 1.01 | 0.50 |",
        "auto, 256 tokens and more: 1.01 (least 1.01)",
        "12 products are left out",
        "70 shapes, for 50 of them Triton is taken; a launch takes 40 us",
        "| 2048 | 8 | 200 us | 100 us | 300 us | 210 us | 1.05 | 1.02 | 0 |",
        "* overlap, 8192: RuntimeError: no room",
    ):
        assert text in page
    left_out = [
        {"part": "left out", "system": "NCCL 2.28.9"},
        {"part": "threads", "ranks": 8, "size": 1024, "type": "float32", "late": 2},
    ]
    page = rendered("all_reduce", left_out)
    assert "NCCL 2.28.9 is left out: it takes several" in page
    assert "launched too slowly: 8 x 1024 float32." in page
    pytest.importorskip("matplotlib")
    sharded_gemm.plot(rows, tmp_path / "plot.svg")


class FakeStreams:
    """Streams and events of a device that runs kernels at the same time only if ``at_once``."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            Event=lambda: SimpleNamespace(
                record=lambda: None, synchronize=lambda: None, query=lambda: not self.at_once
            ),
            Stream=lambda device: None,
            stream=contextlib.nullcontext,
            synchronize=lambda device: None,
            _sleep=lambda cycles: None,
        )


@pytest.mark.parametrize("at_once", [True, False])
def test_a_checker_that_runs_one_kernel_at_a_time_is_detected(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitized.torch, "cuda", FakeStreams(at_once).module())
    assert sanitized.side_by_side(torch.device("cuda")) == at_once


def test_the_log_names_what_a_checker_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "side_by_side", lambda device: False)
    sanitized.collectives(torch.device("cpu"))
    output = capsys.readouterr().out
    assert "1 ranks, ring" in output and "2 ranks" not in output
    command = [sys.executable, "-c", f"print({output!r})"]
    log = steps.Log(tmp_path / "log")
    outcome = steps.run_step("racecheck", command, {}, time.monotonic() + 30, log)
    assert outcome.good and outcome.note.startswith("kernels run one at a time here")


class FakeGpu:
    """A device that must sleep ``needed`` cycles for all launches to be queued in the meantime."""

    def __init__(self, needed: int) -> None:
        self.slept: list[int] = []
        self._needed = needed

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: None,
            query=lambda: self.slept[-1] < self._needed,
            synchronize=lambda: None,
            elapsed_time=lambda end: 6.0,
        )

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            Event=self.event, _sleep=self.slept.append, synchronize=lambda device: None
        )


@pytest.mark.parametrize(("needed", "tries"), [(1, 1), (timing.HEAD_START * 4, 2)])
def test_device_time_is_measured_again_until_launches_were_ahead(
    needed: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGpu(needed)
    monkeypatch.setattr(timing.torch, "cuda", fake.module())
    calls: list[int] = []
    seconds = timing.device_seconds(lambda: calls.append(1), torch.device("cuda"), 3)
    assert seconds == pytest.approx(2e-3)
    assert len(calls) == 3 * tries and len(fake.slept) == tries


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
    with contextlib.closing(all_reduce.Threads(2, torch.device("cpu"))) as threads:
        calls = all_reduce.Calls(threads, 64, torch.float32)
        assert calls.seconds("ordinary", "auto") == [tries]
    assert waited == waits[:tries] and calls.late == late


def test_collectives_leave_time_for_ranks_that_are_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def by_threads(*case: object) -> timing.Row:
        clock[0] += 10.0
        return {}

    monkeypatch.setattr(all_reduce, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(all_reduce, "by_threads", by_threads)
    monkeypatch.setattr(all_reduce, "by_processes", lambda *case: {"sizes": {}})
    args = argparse.Namespace(quick=False, device=torch.device("cpu"), seconds=200.0)
    rows = list(all_reduce.run(args))
    assert [row["part"] for row in rows] == ["threads"] * 13 + ["left out"] + ["processes"] * 2
    assert {row["ranks"] for row in rows[:13]} == {2, 4, 8}
    page = rendered("all_reduce", rows)
    assert "17 cases of ranks that are threads are left out: there was no time for them." in page


def test_a_failing_case_has_a_row_and_is_in_the_table() -> None:
    def fail() -> timing.Row:
        raise ValueError("no such case")

    rows = [*timing.attempt({"case": "a"}, lambda: {"x": 1}), *timing.attempt({"case": "b"}, fail)]
    assert rows[0] == {"case": "a", "x": 1}
    assert rows[1]["case"] == "b" and "ValueError: no such case" in rows[1]["error"]
    assert timing.errors(rows, "case") == "\n\nFailed:\n\n* b: ValueError: no such case"
    assert timing.errors(rows[:1], "case") == ""
    traceback = (
        "Traceback:\n  File x, line 1\n    f()\nCUDAError: no memory\nSearch for\nCompile with"
    )
    assert timing.reason(traceback) == "CUDAError: no memory"
    assert timing.reason("killed\nby a signal") == "by a signal"


def test_results_are_kept_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> Iterator[timing.Row]:
        yield {"x": 1}
        raise KeyboardInterrupt

    module = SimpleNamespace(__doc__="What it does.", CONDITIONS={"a": 1}, run=run)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch"])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert json.loads((tmp_path / "gpu.micro_batch.json").read_text())["rows"] == [{"x": 1}]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "micro_batch", "--device", "cpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "results on cpu mean nothing" in capsys.readouterr().err
