"""The backend of torch.distributed: arguments, layouts, versions, profiles, different calls."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.ranks import in_group
from support.sweeps.collectives import waited
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)


@in_group(2)
def test_a_call_that_is_refused_for_one_tensor_has_started_none(rank: int) -> None:
    group, x, whole = dist.group.WORLD, torch.ones(2), torch.ones(4)
    wrong = torch.ones(3)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    gathered = torch.zeros(4)
    for call, error, says in (
        (
            lambda: group.allreduce_coalesced([x, x + 0j], options),
            TypeError,
            "no reduction",
        ),
        (lambda: dist.all_reduce_coalesced([x.to("meta"), x]), ValueError, "a call for each dev"),
        (lambda: dist.all_reduce_coalesced([x, x[:1].expand(2)]), ValueError, "several elements"),
        (
            lambda: group.allgather_into_tensor_coalesced([gathered, wrong], [x, x]),
            ValueError,
            "all_gather over 2 ranks needs 2 x 2 elements",
        ),
        (
            lambda: group.reduce_scatter_tensor_coalesced([x, x], [whole, wrong]),
            ValueError,
            "reduce_scatter over 2 ranks needs 2 x 2 elements",
        ),
    ):
        if rank:  # Alone: a call that has started would wait for the other rank.
            with pytest.raises(error, match=says):
                work = call()
                work.wait()
        assert x.tolist() == [1, 1] and gathered.sum() == 0
    dist.all_reduce(x)
    assert x.tolist() == [2, 2]


@in_group(2)
def test_versions_of_tensors_that_native_calls_change(rank: int) -> None:
    x, both = torch.ones(2), torch.ones(4)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.group.WORLD._reduce_scatter_base(x, both, waited(dist.ReduceScatterOptions))
    dist.group.WORLD._allgather_base(both, x, waited(AllgatherOptions))
    assert (x._version, both._version) == (3, 1)


class Seen(TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def make_calls(group: Any, rank: int) -> list[list[float]]:
    """One of each, and a step of DDP; what they gave."""
    x, both, part = torch.arange(1.0, 3.0) + rank, torch.zeros(4), torch.zeros(1)
    lists = [[torch.zeros(2) for _ in range(2)] for _ in range(3)]
    swapped = torch.zeros(2)
    dist.barrier(group)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_reduce(functional.all_reduce(x, "sum", group), group=group)
    dist.broadcast(x, 0, group)
    dist.reduce(x.clone(), 0, group=group)
    dist.all_gather(lists[0], x, group)
    dist.all_gather_into_tensor(both, x, group)
    dist.reduce_scatter_tensor(part, x, group=group)
    dist.reduce_scatter(part, [part.clone(), part.clone()], group=group)
    dist.all_to_all(lists[1], list(both.split(2)), group)
    dist.all_to_all_single(swapped, x, group=group)
    dist.gather(x, None if rank else lists[2], 0, group)
    dist.scatter(x, None if rank else lists[2], 0, group)
    with dist._coalescing_manager(group):
        for tensor in lists[0]:
            dist.all_reduce(tensor, group=group)
    for work in (dist.isend(x, 1 - rank, group), dist.irecv(both[:2], 1 - rank, group)):
        work.wait()
    model = nn.Linear(2, 1, bias=False)
    nn.parallel.DistributedDataParallel(model, process_group=group)(x).sum().backward()
    results = [x, both, part, swapped, *lists[0], *lists[1], model.weight.grad]
    return [each.flatten().tolist() for each in results]


@in_group(2)
def test_modes_and_profilers_see_what_they_see_of_gloo(rank: int) -> None:
    seen, counted, profiled, results = [], [], [], []
    for name in ("gloo", "pipekernels"):
        group = dist.new_group(backend=name)
        with CommDebugMode() as comms, Seen() as outer, Seen() as inner:
            results.append(make_calls(group, rank))
        assert inner.counts == outer.counts
        seen.append(outer.counts)
        counted.append(comms.get_comm_counts())
        with profile(activities=[ProfilerActivity.CPU]) as found:
            make_calls(group, rank)
        names = [event.name for event in found.events()]
        ours = [event for event in found.events() if event.name.startswith("pipekernels::")]
        assert not any(event.is_async for event in ours)  # Each has ended on its thread.
        profiled.append(Counter(each for each in names if each.startswith("c10d::")))
        with Seen() if rank else nullcontext():  # One rank alone may be observed.
            results.append(make_calls(group, rank))
        with FakeTensorMode() as mode:
            x, both = torch.ones(2), torch.ones(4)
        for inside in (mode, nullcontext()):
            with inside:
                dist.barrier(group)
                dist.all_gather_into_tensor(both, x, group)
                dist.all_reduce(x, group=group, async_op=True).wait()
    assert seen[0] == seen[1] and counted[0] == counted[1] and profiled[0] == profiled[1]
    assert len(counted[0]) >= 12, counted[0]
    assert all(each == results[0] for each in results), results
    assert {f"pipekernels::{call} of 8 bytes" for call in ("broadcast", "reduce")} < set(names)


@in_group(3)
def test_arguments_are_read_at_the_call(rank: int) -> None:
    """Lists that the caller uses again while an earlier call keeps the group busy."""
    inputs, outputs = [torch.full((2,), i + 5.0) for i in range(3)], [torch.zeros(2)] * 3
    received, sizes = torch.zeros(3), [1] * 3
    busy = dist.all_reduce(torch.ones(3_000_000), async_op=True)
    own, mine = torch.zeros(2), torch.zeros(2)
    works = [
        dist.reduce_scatter(own, inputs, async_op=True),
        dist.all_to_all_single(
            received, torch.arange(3.0) + 10 * rank, sizes, sizes, async_op=True
        ),
        dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True),
        dist.scatter(mine, inputs if rank == 1 else None, 1, async_op=True),
    ]
    gathered = outputs[:]
    outputs[:] = inputs[:] = [torch.full((2,), -1.0)] * 3
    sizes[:] = [3, 0, 0]
    for work in (busy, *works):
        work.wait()
    assert own.tolist() == [3 * (rank + 5.0)] * 2
    assert received.tolist() == [10.0 * i + rank for i in range(3)]
    assert gathered[2].tolist() == [2.0] * 2 and mine.tolist() == [rank + 5.0] * 2


@in_group(2)
def test_negative_views_and_layouts(rank: int) -> None:
    def negative(count: int) -> torch.Tensor:
        return torch._neg_view(torch.zeros(count))

    out, base = torch.zeros(5), torch.arange(10.0)
    dist.reduce_scatter_tensor(out, base.view(5, 2).t())
    assert out.tolist() == [2.0 * i for i in base.view(5, 2)[:, rank].tolist()]
    dist.reduce_scatter_tensor(out, torch.ones(2, 1).expand(2, 5))
    assert out.tolist() == [2.0] * 5
    x, both = negative(5), negative(4)
    dist.reduce_scatter_tensor(x, torch.ones(10))
    dist.all_gather_into_tensor(both, torch.full((2,), rank + 1.0))
    assert x.tolist() == [2.0] * 5 and both.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.compile
@in_group(2)
def test_a_call_breaks_the_graph(rank: int) -> None:
    """Of torch.compile, which cannot trace the methods of a group."""

    def calls(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.barrier()
        dist.broadcast(y, 0)
        dist.all_reduce(y, async_op=True).wait()
        received = torch.empty(2)
        dist.send(y, 0) if rank else dist.recv(received, 1)
        dist.reduce_scatter(received, [y, y])
        return received

    x = torch.ones(2) + rank
    assert torch.compile(calls, backend="eager")(x).equal(calls(x))
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    torch.compile(ddp, backend="eager")(x).sum().backward()
    assert next(ddp.parameters()).grad.tolist() == [[1.5, 1.5]]


@in_group(2)
def test_ranks_that_disagree_are_named_at_once(rank: int) -> None:
    """What is compared is the call that the user makes, whatever it is made of."""
    x, op = torch.ones(4), dist.ReduceOp
    both = [torch.ones(4), torch.ones(4)]
    for ours, theirs in (
        (lambda: dist.all_reduce(x.int(), op.AVG), lambda: dist.all_reduce(x.long())),
        (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(1.0))),
        (lambda: dist.scatter(x, both, 0), lambda: dist.broadcast(x, 0)),
        (lambda: dist.all_to_all_single(both[0], x), dist.barrier),
    ):
        with pytest.raises(ValueError, match="different collectives: rank 0 .*rank 1"):
            (theirs if rank else ours)()
    dist.all_reduce(x)  # The group stays usable.
    assert x.tolist() == [2.0] * 4
