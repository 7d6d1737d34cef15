"""The backend of torch.distributed: strided tensors, reductions, coalesced and different calls."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import in_group
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A strided tensor whose neighbours in memory are 9, or True."""
    whole = torch.full((3, 2), 9).to(dtype)
    whole[:, 0] = value
    return whole[:, 0]


@in_group(3)
def test_strided_tensors(rank: int) -> None:
    size, op, base = dist.get_world_size(), dist.ReduceOp, torch.arange(1.0, 4.0)
    touched = []

    def check(tensor: torch.Tensor, value: float) -> None:
        touched.append(tensor)
        assert tensor.tolist() == [value] * 3, (tensor, value)

    for dtype, reduction, value in (
        (torch.float32, op.PRODUCT, 6),
        (torch.int8, op.SUM, 6),
        (torch.uint8, op.MAX, 3),
        (torch.int64, op.BOR, 3),
        (torch.int64, op.AVG, 2),
        (torch.int16, op.BXOR, 0),
        (torch.float64, dist._make_nccl_premul_sum(0.5), 3),
    ):
        x = column(rank + 1, dtype)
        dist.all_reduce(x, reduction)
        check(x, value)
    x = column(rank + 1)
    dist.reduce(x, 1, op.PRODUCT)
    check(x, 6 if rank == 1 else rank + 1)
    x = column(rank + 1)
    dist.reduce_scatter(x, [torch.full((3,), i + rank + 1.0) for i in range(size)], op.PRODUCT)
    check(x, (rank + 1) * (rank + 2) * (rank + 3))
    x = column(0)
    dist.scatter(x, [column(i) for i in range(size)] if rank == 2 else None, 2)
    check(x, rank)
    gathered = [column(0) for _ in range(size)] if rank == 0 else None
    dist.gather(column(rank), gathered)
    for i, x in enumerate(gathered or ()):
        check(x, i)
    swapped = [column(0) for _ in range(size)]
    dist.all_to_all(swapped, [column(10 * rank + i) for i in range(size)])
    for i, x in enumerate(swapped):
        check(x, 10 * i + rank)
    x = torch.zeros(3, 2)
    dist.all_to_all_single(x[:, 0], base + rank)
    assert x[:, 0].tolist() == [rank + 1.0 + i for i in range(3)] and not x[:, 1].any()
    x = column(0)
    works = [dist.isend(column(rank), (rank + 1) % size), dist.irecv(x, (rank - 1) % size)]
    for work in works:
        work.wait()
    check(x, (rank - 1) % size)
    for tensor in touched:
        beside = tensor._base[:, 1]
        assert (beside == torch.tensor(9).to(beside.dtype)).all()


@in_group(2)
def test_ranks_may_differ_in_shapes_and_strides(rank: int) -> None:
    """What one rank does in one native call, the other prepares in Python."""

    def tensor(value: float, elements: int = 6) -> torch.Tensor:
        if rank == 0:
            return torch.ones(2, elements // 2) * value
        return (torch.ones(elements, 2) * value)[:, 0]

    group = dist.group.WORLD
    x = tensor(rank + 1.0)
    dist.all_reduce(x)
    assert x.unique().tolist() == [3]
    dist.broadcast(x.fill_(rank), 1)
    assert x.unique().tolist() == [1]
    gathered = tensor(0, 12)
    group._allgather_base(gathered, tensor(float(rank)), waited(AllgatherOptions)).wait()
    assert gathered.flatten().tolist() == [0] * 6 + [1] * 6
    group._reduce_scatter_base(x, tensor(rank + 1.0, 12), waited(dist.ReduceScatterOptions)).wait()
    assert x.unique().tolist() == [3]


@in_group(2)
def test_input_and_output_may_share_memory(rank: int) -> None:
    group, both = dist.group.WORLD, torch.full((4,), rank + 5.0)
    own = both.chunk(2)[rank]
    group._allgather_base(both, own, waited(AllgatherOptions)).wait()
    assert both.tolist() == [5, 5, 6, 6]
    group._reduce_scatter_base(own, both, waited(dist.ReduceScatterOptions)).wait()
    assert own.tolist() == [10 + 2 * rank] * 2


def waited(options: Any) -> Any:
    made = options()
    made.asyncOp = False
    return made


@in_group(2)
def test_reductions_that_a_communicator_has_not(rank: int) -> None:
    op = dist.ReduceOp
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.float32):
        for reduction, value in ((op.AVG, 3), (op.PRODUCT, 8), (op.BXOR, 6)):
            if reduction == op.BXOR and dtype.is_floating_point:
                continue
            x = torch.tensor([2 + 2 * rank] * 4, dtype=dtype)
            dist.all_reduce(x, reduction)
            out = torch.zeros(2, dtype=dtype)
            full = torch.tensor([2 + 2 * rank] * 4, dtype=dtype)
            options = waited(dist.ReduceScatterOptions)
            options.reduceOp = reduction
            dist.group.WORLD._reduce_scatter_base(out, full, options).wait()
            assert x.tolist() == [value] * 4 and out.tolist() == [value] * 2
    x = torch.ones(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [1, 1]


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
def test_coalesced_calls(rank: int) -> None:
    tensors = [torch.full((i + 1,), rank + 1.0) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.tolist() for t in tensors] == [[3.0], [3.0] * 2, [3.0] * 3]


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
