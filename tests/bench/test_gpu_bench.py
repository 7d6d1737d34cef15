"""Benchmarks of GPUs on the CPU, with Gloo in NCCL's place; test_bench.py runs every program."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.programs import python

from bench import __main__ as bench
from bench import registry
from bench.gpu import nccl, sanitized
from bench.gpu.ranks import OURS, Buffers, Ranks
from bench.harness import Options, Turns
from pipekernels import Communicator

pytestmark = [pytest.mark.full, pytest.mark.project]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", sanitized.PARTS)
def test_programs_for_the_sanitizer_are_correct(part: str, device: torch.device) -> None:
    sanitized.PARTS[part](device)


def test_rows_are_kept_case_by_case_as_far_as_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    path = tmp_path / "gpu.micro_batch.json"

    def turns(case: str, names: list[str], options: Options) -> Turns:
        clock[0] += 10.0
        if case == "b":
            raise ValueError("no such case\nSearch for\nCompile with")
        assert case == "a" or "no such case" in path.read_text()
        return Turns({name: lambda: 1.0 for name in names}, 0, 2)

    module = SimpleNamespace(CONDITIONS={}, BASE="x", GPU=dict.fromkeys("abcd", "x"), turns=turns)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(registry, "find", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["bench", "gpu.micro_batch", "--seconds", "25"])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert bench.main() == 1
    first, failed, third, note = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["median"]) for row in (first, third)] == [("a", 1.0), ("c", 1.0)]
    assert failed == {"case": "b", "error": "ValueError: no such case"}
    assert note["note"].startswith("1 cases are left out")


@pytest.mark.processes
def test_nccl_starts_its_own_ranks() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = ["-m", "bench", "nccl", "--device", "cpu", "--quick"]
    printed = python(*command, cwd=ROOT, env=environment).stdout
    assert "0 elements are wrong; 0 cases failed" in printed
    for operation in nccl.PLACES:
        assert f"**{operation}; 2 ranks**" in printed
    assert "| .to / it | size" in printed


@pytest.mark.parametrize("operation", nccl.PLACES)
def test_a_wrong_element_is_counted(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda self, number: number)
    (comm,) = Communicator.threads(1)
    ranks: Any = Ranks(0, 1, torch.device("cpu"), "Gloo", comm, None)
    buffers = Buffers(operation, 64, torch.float32, ranks, False, False)
    ours = buffers.calls()[OURS]
    assert buffers.wrong(ours) == 0
    result = buffers.own if operation == "reduce_scatter" else buffers.whole
    assert buffers.wrong(lambda: (ours(), result[3:4].add_(1))) == 1
