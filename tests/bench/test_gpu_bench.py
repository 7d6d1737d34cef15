"""Benchmarks of GPUs on the CPU, with Gloo in NCCL's place; test_gpu_check.py runs the others."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import python

from bench.gpu import nccl, sanitized
from bench.gpu.ranks import OURS, Buffers, Ranks
from pipekernels import Communicator

pytestmark = [pytest.mark.full, pytest.mark.project]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", sanitized.PARTS)
def test_programs_for_the_sanitizer_are_correct(part: str, device: torch.device) -> None:
    sanitized.PARTS[part](device)


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
