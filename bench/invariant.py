"""What bits that do not depend on the number of ranks cost a row-parallel layer, on two CPU ranks:
:class:`RowParallelLinear` without and with ``invariant=True``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bench.harness import Options, Turns
from bench.processes import Serve, join, repeated, started

RANKS = 2
IN, OUT = 11008, 4096
# dtype, rows, whether there is a backward, steps per turn. Where a CPU has no instructions for
# bfloat16, torch takes half a minute for a backward in it, with either layer.
CASES = {
    "float32, 1 row, forward": (torch.float32, 1, False, 20),
    "float32, 128 rows, forward": (torch.float32, 128, False, 1),
    "float32, 128 rows, forward and backward": (torch.float32, 128, True, 1),
    "float32, 512 rows, forward": (torch.float32, 512, False, 1),
    "bfloat16, 1 row, forward": (torch.bfloat16, 1, False, 20),
    "bfloat16, 128 rows, forward": (torch.bfloat16, 128, False, 1),
    "bfloat16, 512 rows, forward": (torch.bfloat16, 512, False, 1),
}
CANDIDATES = dict.fromkeys(CASES, ("plain", "invariant"))
QUICK = {"float32, 1 row, forward": ("plain", "invariant")}
BASE = "plain"
CONDITIONS = {
    "layer": f"RowParallelLinear({IN}, {OUT}, bias=False), the down projection of a 7B Llama",
    "ranks": f"{RANKS} processes of one thread",
    "timing": "slowest rank, both in turn, the first step of each turn does not count, medians",
}


def _layer(rank: int, port: int, serve: Serve, case: str, invariant: bool) -> None:
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import RowParallelLinear

    join("gloo", rank, RANKS, port)
    dtype, rows, backward, steps = CASES[case]
    torch.manual_seed(0)
    full = nn.Linear(IN, OUT, bias=False).to(dtype)
    x, grad = torch.randn(rows, IN).to(dtype), torch.randn(rows, OUT).to(dtype)
    with Communicator.from_process_group() as comm:
        layer = RowParallelLinear.from_linear(full, comm, invariant=invariant)
        part = x.chunk(RANKS, 1)[rank].clone().requires_grad_(backward)

        def step() -> torch.Tensor:
            with torch.set_grad_enabled(backward):
                y: torch.Tensor = layer(part)
            if backward:
                layer.weight.grad = part.grad = None
                y.backward(grad)
            return y

        few = x[:8], full.weight[:64]
        exact = few[0].double() @ few[1].double().t()
        found = step().detach()[:8, :64].double()
        limit = 2 * IN * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        bound = limit * (few[0].double().abs() @ few[1].double().abs().t())
        assert ((found - exact).abs() <= bound).all()
        del full
        serve(repeated(step, steps))


WORKERS = {"plain": (RANKS, _layer, False), "invariant": (RANKS, _layer, True)}


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Both layers."""
    return Turns(started(WORKERS, names, case), 1, 5 if options.quick else 9)
