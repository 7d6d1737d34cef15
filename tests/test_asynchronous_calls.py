"""The backend of torch.distributed: calls that nobody waits for at once."""

import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import in_group

pytestmark = pytest.mark.processes

# This import registers the backend. It needs torch 2.7.
pytest.importorskip("pipekernels.distributed", exc_type=ImportError)

SMALL, LARGE = 100, 300_000  # Elements of calls that run where they are made, or do not.


@pytest.mark.parametrize("size", [SMALL, LARGE])
@in_group(2)
def test_two_groups_in_different_orders(rank: int, size: int) -> None:
    groups = [dist.group.WORLD, dist.new_group()]
    for round in range(50 if size == SMALL else 5):
        tensors = [torch.full((size,), float(round + i)) for i in range(2)]
        works = [
            dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in (rank, 1 - rank)
        ]
        for work in works[:: 1 - 2 * (round % 2)]:
            work.wait()
        assert [x.unique().tolist() for x in tensors] == [[2.0 * round], [2.0 * round + 2]]


@in_group(2)
def test_a_call_waits_for_no_peer(rank: int) -> None:
    x, other = torch.ones(SMALL), dist.new_group()
    for _ in range(20):
        if rank == 1:  # It comes only when the call of rank 0 has returned.
            dist.barrier(other)
        work = dist.all_reduce(x.fill_(1), async_op=True)
        if rank == 0:
            assert not work.is_completed()
            dist.barrier(other)
        work.wait()
        assert x.eq(2).all()


@in_group(3)
def test_calls_of_all_kinds_keep_their_order(rank: int) -> None:
    generator, op = random.Random(3), dist.ReduceOp
    x, total, works, value = torch.full((SMALL,), rank + 1), torch.zeros(LARGE), list[Any](), 0
    for _ in range(100):
        if (kind := generator.randrange(6)) == 0 or len(works) > 20:
            dist.barrier()
            assert all(work.is_completed() for work in works)
            assert not works or x.eq(value).all()
            works = []
            x.fill_(rank + 1)
        elif kind < 3:
            works.append(dist.all_reduce(x, op.SUM, async_op=True))
            value = 3 * value if works[1:] else 6
        elif kind == 3:  # No native call makes these two.
            works.append(dist.all_reduce(x, op.AVG, async_op=True))
            value = value if works[1:] else 2
        elif kind == 4:
            rows = [torch.empty_like(x) for _ in range(3)]
            works += [dist.all_gather(rows, x, async_op=True) for _ in works[:1]]
        else:
            works += [dist.all_reduce(total, async_op=True) for _ in works[:1]]


@in_group(2)
def test_tensors_are_kept_until_their_call_has_ended(rank: int) -> None:
    other = dist.new_group()
    tensor = torch.ones(LARGE)
    seen = weakref.ref(tensor)
    if rank == 1:
        dist.barrier(other)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    if rank == 0:
        assert seen() is not None
        dist.barrier(other)
    dist.barrier()
