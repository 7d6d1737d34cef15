"""What the log and torch.profiler show of collectives.

The algorithm of an all-reduce is logged once for each dtype and size class.
"""

import logging

import pytest
import torch
from support.ranks import run_threads
from torch.profiler import ProfilerActivity, profile

from pipekernels import Communicator


def reduce_all(comm: Communicator) -> None:
    for _ in range(2):
        for elements in (1, 512, 500, 513, 4096):
            comm.all_reduce(torch.ones(elements))
        comm.all_reduce(torch.ones(2, 2).t()[:1], algorithm="ring")  # Not by the fast path.
        comm.all_reduce(torch.ones(1, dtype=torch.float64))


def test_the_log_names_the_algorithm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pipekernels.comm"):
        run_threads(2, reduce_all)
    expected = [
        "all_reduce of 4 bytes of torch.float32: one_shot, by size",
        "all_reduce of 2048 bytes of torch.float32: one_shot, by size",
        "all_reduce of 2000 bytes of torch.float32: one_shot, by size",
        "all_reduce of 2052 bytes of torch.float32: two_shot, by size",
        "all_reduce of 16384 bytes of torch.float32: two_shot, by size",
        "all_reduce of 8 bytes of torch.float32: ring, as the caller asks",
        "all_reduce of 8 bytes of torch.float64: one_shot, by size",
    ]
    assert sorted(caplog.messages) == sorted(2 * expected)  # Of two ranks.


def test_reductions_are_not_watched_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    (comm,) = Communicator.threads(1)
    assert comm._all_reduce_tensor == comm._cpu_backend.core.all_reduce_tensor
    comm.all_reduce(torch.ones(2))
    assert not caplog.records


def test_collectives_have_ranges_with_their_bytes() -> None:
    (comm,) = Communicator.threads(1)
    x = torch.ones(4, 3)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        comm.all_reduce(x)
        comm.all_reduce(x.t()[:2], algorithm="ring")  # Which is not dense.
        comm.all_gather(x)
        comm.reduce_scatter(x)
        comm.broadcast(x, 0)
    assert sorted(name.partition("::")[2] for name in names_in(found)) == [
        "all_gather of 48 bytes",
        "all_reduce of 32 bytes, ring",
        "all_reduce of 48 bytes, auto",
        "broadcast of 48 bytes",
        "reduce_scatter of 48 bytes",
    ]
    assert x.eq(1).all()


def names_in(found: profile) -> list[str]:
    names = (event.name for event in found.events() or ())
    return [name for name in names if name.startswith("pipekernels::")]


def test_a_wrong_call_raises_under_a_profiler_what_it_raises_without() -> None:
    (comm,) = Communicator.threads(1)
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(ValueError, match="product"):
        comm.all_reduce(torch.ones(1), "product")
