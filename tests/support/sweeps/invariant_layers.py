"""Random layers with ``invariant=True``, whose bits are compared between numbers of ranks."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear
from support.ranks import run_threads
from support.sweeps.collectives import same_bits

RANKS = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Results = dict[str, Tensor]


def assert_same_bits(
    body: Callable[[Communicator], Results], ranks: tuple[int, ...] = RANKS
) -> Results:
    """``body`` gives full tensors, on every rank. Returns those of one rank."""

    def on_one_thread(comm: Communicator) -> Results:
        torch.set_num_threads(1)  # Products on two may have other bits.
        return body(comm)

    expected, *others = [run_threads(count, on_one_thread) for count in ranks]
    for found in (rank for all_ranks in others for rank in all_ranks):
        assert found.keys() == expected[0].keys()
        for name, value in expected[0].items():
            differs = (value != found[name]).sum()
            assert same_bits(value, found[name]), f"{name}: {differs} elements differ"
    return expected[0]


def gradients(module: Any) -> Results:
    """Of all parameters of a sharded layer, gathered."""
    return {
        f"grad of {name}": module.gather(name, p.grad)
        if name in module.shard_dims
        else p.grad.clone()
        for name, p in module.named_parameters()
    }


def random_case(number: int) -> tuple[Callable[[Communicator], Results], str]:
    """A layer and an input, of random sizes and dtypes."""
    choose = random.Random(number)
    dtype = choose.choice(DTYPES)
    rows = choose.choice([1, 2, 4, 5, choose.randint(1, 40), 8 * choose.randint(1, 5)])
    sharded, other = 64 * choose.randint(1, 5), choose.randint(1, 90)
    kind = choose.choice(["row", "row, scattered", "column", "column, gathered", "blocks"])
    bias = kind != "row, scattered" and choose.random() < 0.5
    torch.manual_seed(number)
    if kind.startswith("row"):
        rows = 8 * choose.randint(1, 4) if kind == "row, scattered" else rows
        full, width = nn.Linear(sharded, other, bias, dtype=dtype), sharded
    else:
        full, width = nn.Linear(other, 2 * sharded, bias, dtype=dtype), other
    x = torch.randn(rows, width, dtype=torch.float64).to(dtype)
    weights = torch.randn(rows, full.out_features, dtype=torch.float64).to(dtype)

    def body(comm: Communicator) -> Results:
        part = slice(
            comm.rank * width // comm.world_size, (comm.rank + 1) * width // comm.world_size
        )
        found: Results = {}
        if kind.startswith("row"):
            reduce = "reduce_scatter" if kind == "row, scattered" else "all_reduce"
            layer = RowParallelLinear.from_linear(full, comm, reduce=reduce, invariant=True)
            leaf = x[:, part].clone().requires_grad_()
            y = layer(leaf)
            own = weights.chunk(comm.world_size)[comm.rank] if reduce != "all_reduce" else weights
            (y * own).sum().backward()
            found["output"] = comm.all_gather(y) if reduce != "all_reduce" else y.detach()
            joined = comm.all_gather(leaf.grad.t().contiguous())
            found["grad of x"] = joined.t().contiguous()
        else:
            options: dict[str, Any] = {"gather_output": kind == "column, gathered"}
            if kind == "blocks":
                options = {"blocks": [sharded, sharded]}
            layer = ColumnParallelLinear.from_linear(full, comm, invariant=True, **options)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            spans = layer.spans("weight")
            if kind == "column, gathered":
                own, found["output"] = weights, y.detach()
            else:
                own = torch.cat([weights[:, a : a + n] for a, n in spans], 1)
                output = layer.gather("weight", y.detach().t().contiguous())
                found["output"] = output.t().contiguous()
            (y * own).sum().backward()
            found["grad of x"] = leaf.grad
        with torch.no_grad():
            again = layer(leaf)
        assert torch.equal(again, y)
        return found | gradients(layer)

    return body, f"{kind}, {dtype}, {rows} rows, {full}"
