"""What torch.profiler shows of collectives."""

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
