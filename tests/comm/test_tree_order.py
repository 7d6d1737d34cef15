"""Sums in tree order: how they are added, and that they do not depend on the number of ranks."""

import pytest
import torch
from support import reference
from support.ranks import on, on_ranks, run_threads
from support.sweeps.collectives import ALGORITHMS
from torch import Tensor

from pipekernels import Communicator, ops

TERMS = 8


def terms(dtype: torch.dtype, count: int = 1001) -> list[Tensor]:
    """Numbers of very different sizes, so that almost every order has a sum of its own."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(TERMS, count, generator=generator, dtype=torch.float64)
    powers = torch.randint(-9, 3, (TERMS, count), generator=generator)
    return list((normal * 2.0**powers).to(dtype))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_do_not_depend_on_the_number_of_ranks(algorithm: str, device: torch.device) -> None:
    """Each rank adds up its own subtree, and the all-reduce the rest of the tree."""
    inputs = [x.to(device) for x in terms(torch.float32, 70_001)]
    t = inputs
    shares = {
        8: t,
        4: [t[0] + t[1], t[2] + t[3], t[4] + t[5], t[6] + t[7]],
        2: [(t[0] + t[1]) + (t[2] + t[3]), (t[4] + t[5]) + (t[6] + t[7])],
        1: [((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]))],
    }

    def on_rank(comm: Communicator, order: str) -> Tensor:
        x = shares[comm.world_size][comm.rank].clone()
        return comm.all_reduce(x, algorithm=algorithm, order=order).cpu()

    def results(order: str) -> list[Tensor]:
        return [x for n in shares for x in run_threads(n, on(device, on_rank, order))]

    first, *others = results("tree")
    assert len(others) == 14 and all(x.equal(first) for x in others)
    first, *others = results("rank")
    assert not all(x.equal(first) for x in others)


@on_ranks(TERMS, run_threads)
def test_gradients_are_summed_in_the_same_order(comm: Communicator, device: torch.device) -> None:
    inputs = [x.to(device) for x in terms(torch.float32)]
    expected = {order: reference.all_reduce(inputs, "sum", order) for order in ("rank", "tree")}
    slices = reference.reduce_scatter([x[:1000] for x in inputs], "avg", "tree")
    assert not expected["rank"].equal(expected["tree"])
    for order, total in expected.items():
        x = inputs[comm.rank].clone().requires_grad_()
        y = ops.all_reduce(x, comm, order=order)
        assert y.equal(total)
        y.backward(inputs[comm.rank])
        assert x.grad.equal(total)
    x = inputs[comm.rank][:1000].clone().requires_grad_()
    y = ops.reduce_scatter(x, comm, "avg", order="tree")
    assert y.equal(slices[comm.rank])
    y.backward(torch.full_like(y, float(comm.rank)))
    assert x.grad.equal(torch.arange(8.0, device=device).repeat_interleave(125) / 8)
