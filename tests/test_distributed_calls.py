"""The backend of torch.distributed: calls that Gloo runs, versions, profiles, different calls."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import in_group
from support.sweeps.collectives import waited
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


@in_group(3)
def test_strided_tensors_of_calls_that_gloo_runs(rank: int) -> None:
    def column(value: float) -> torch.Tensor:
        whole = torch.full((3, 2), 9.0)
        whole[:, 0] = value
        return whole[:, 0]

    touched = [column(0) for _ in range(4)]
    x, *swapped = touched
    dist.all_to_all(swapped, [column(10 * rank + i) for i in range(3)])
    works = [dist.isend(column(rank), (rank + 1) % 3), dist.irecv(x, (rank - 1) % 3)]
    for work in works:
        work.wait()
    assert x.tolist() == [(rank - 1) % 3] * 3
    assert [each.tolist() for each in swapped] == [[10.0 * i + rank] * 3 for i in range(3)]
    x = column(0)
    dist.all_to_all_single(x, torch.arange(1.0, 4.0) + rank)
    assert x.tolist() == [rank + 1.0 + i for i in range(3)]
    assert all(each._base[:, 1].eq(9).all() for each in (x, *touched))


@in_group(2)
def test_versions_of_tensors_that_native_calls_change(rank: int) -> None:
    x, both = torch.ones(2), torch.ones(4)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.group.WORLD._reduce_scatter_base(x, both, waited(dist.ReduceScatterOptions))
    dist.group.WORLD._allgather_base(both, x, waited(AllgatherOptions))
    assert (x._version, both._version) == (3, 1)


@in_group(2)
def test_the_profiler_sees_calls(rank: int) -> None:
    x = torch.ones(2)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
    names = {event.name for event in found.events()}
    assert names > {"pipekernels::all_reduce of 8 bytes, auto", "pipekernels::broadcast of 8 bytes"}


@in_group(2)
def test_ranks_that_disagree_are_named_at_once(rank: int) -> None:
    """What one rank would once have sent to Gloo and the other to the communicator."""
    x, op = torch.ones(4), dist.ReduceOp
    for ours, theirs in (
        (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op.PRODUCT)),
        (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x.to(torch.uint8))),
        (lambda: dist.all_reduce(x), lambda: dist.reduce(x.to(torch.int8), 0)),
    ):
        with pytest.raises(ValueError, match="different collectives: rank 0 all_reduce.*rank 1"):
            (theirs if rank else ours)()
