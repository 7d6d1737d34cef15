"""The algorithm that an all-reduce takes is logged once for each dtype and size class."""

import json
import logging
from pathlib import Path

import pytest
import torch
from support.ranks import run_threads

from pipekernels import Communicator
from pipekernels.comm import all_reduce_limits


def reduce_all(comm: Communicator) -> None:
    for _ in range(2):
        for elements in (1, 512, 500, 513, 4096):
            comm.all_reduce(torch.ones(elements))
        comm.all_reduce(torch.ones(2, 2).t()[:1], algorithm="ring")  # Not by the fast path.
        comm.all_reduce(torch.ones(1, dtype=torch.float64))


def test_by_the_built_in_limit(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    with caplog.at_level(logging.INFO, "pipekernels.comm"):
        run_threads(2, reduce_all)
    messages = [record.message for record in caplog.records]
    builtin = "by the built-in limit"
    expected = [
        f"all_reduce of 4 bytes of torch.float32: one_shot, {builtin}",
        f"all_reduce of 2048 bytes of torch.float32: one_shot, {builtin}",
        f"all_reduce of 2000 bytes of torch.float32: one_shot, {builtin}",
        f"all_reduce of 2052 bytes of torch.float32: two_shot, {builtin}",
        f"all_reduce of 16384 bytes of torch.float32: two_shot, {builtin}",
        "all_reduce of 8 bytes of torch.float32: ring, as the caller asks",
        f"all_reduce of 8 bytes of torch.float64: one_shot, {builtin}",
    ]
    assert sorted(messages) == sorted(2 * expected)  # Of two ranks.


def test_by_a_measured_limit(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    all_reduce_limits.save(all_reduce_limits.Limits({2: 1024}, "today"))
    assert json.loads(all_reduce_limits.path().read_text())["one_shot_bytes"] == {"2": 1024}
    with caplog.at_level(logging.INFO, "pipekernels.comm"):
        run_threads(2, lambda comm: comm.all_reduce(torch.ones(512)))
    messages = {record.message for record in caplog.records}
    assert messages == {
        "all_reduce of 2048 bytes of torch.float32: two_shot, as measured, limit 1024 bytes"
    }


def test_reductions_are_not_watched_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    (comm,) = Communicator.threads(1)
    assert comm._all_reduce_tensor == comm._cpu_backend.core.all_reduce_tensor
    comm.all_reduce(torch.ones(2))
    assert not caplog.records
