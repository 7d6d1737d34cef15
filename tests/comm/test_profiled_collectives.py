"""What torch.profiler shows of collectives."""

import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipekernels import Communicator


def test_collectives_have_ranges_with_their_bytes() -> None:
    (comm,) = Communicator.threads(1)
    x = torch.ones(4, 3)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        comm.all_reduce(x)
        comm.all_reduce(x.t()[:2], algorithm="ring")  # Which is not dense.
        comm.all_gather(x)
        comm.reduce_scatter(x)
        comm.broadcast(x, 0)
    names = names_in(found)
    assert sorted(name.partition("::")[2] for name in names) == [
        "all_gather of 48 bytes",
        "all_reduce of 32 bytes, ring",
        "all_reduce of 48 bytes, auto",
        "broadcast of 48 bytes",
        "reduce_scatter of 48 bytes",
    ]
    assert x.eq(1).all()


def test_a_wait_for_a_peer_is_a_range_within_the_collective() -> None:
    first, second = Communicator.threads(2)
    late = threading.Thread(target=lambda: (time.sleep(0.5), second.all_reduce(torch.ones(4))))
    late.start()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        first.all_reduce(torch.ones(4))
    late.join()
    names = names_in(found)
    assert names == ["pipekernels::all_reduce of 16 bytes, auto", "pipekernels::wait for peers"]
    call, wait = (next(e for e in found.events() if e.name == name) for name in names)
    assert call.time_range.start <= wait.time_range.start
    assert wait.time_range.end <= call.time_range.end
    assert wait.time_range.elapsed_us() > 0.5 * call.time_range.elapsed_us() > 100_000


def test_a_wait_that_fails_ends_its_range() -> None:
    first, _ = Communicator.threads(2, timeout=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        with pytest.raises(TimeoutError):
            first.barrier()
        with pytest.raises(RuntimeError, match="timeout|failure"):
            first.all_reduce(torch.ones(4))
    assert names_in(found) == ["pipekernels::all_reduce of 16 bytes, auto"]


def names_in(found: profile) -> list[str]:
    names = (event.name for event in found.events() or ())
    return [name for name in names if name.startswith("pipekernels::")]


def test_a_wrong_call_raises_under_a_profiler_what_it_raises_without() -> None:
    (comm,) = Communicator.threads(1)
    with profile(activities=[ProfilerActivity.CPU]):
        try:
            comm.all_reduce(torch.ones(1), "product")
        except ValueError as error:
            assert "product" in str(error)
        else:
            raise AssertionError("nothing was raised")
