"""The row-parallel layer of Llama-70B's MLP: product and all-reduce, fused and one after the other.

``fused``: our kernel announces rows of the product, which are summed meanwhile. Else cuBLAS, then
the sum, by us or by torch's backend. Values are checked with zeros and ones, so few that sums over
all ranks are exact in bfloat16, and timed with random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench.nccl.ranks import OURS, Ranks, Work
from bench.timing import bus
from pipekernels.tensor_parallel.functional import row_linear

FUSED, PLAIN = f"{OURS}, fused", f"{OURS}, not fused"
SIZES = (8192, 28672)  # hidden and inner features
TINY_SIZES = (64, 128)
TOKENS = [1, 16, 256, 1024, 4096]
TINY_TOKENS = [3]
MOST_ONES = 200  # in a row of all ranks' inputs: bfloat16 holds integers up to 256
PERIOD = 13


def operands(
    rank: int, ranks: int, tokens: int, sizes: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """A rank's input, ``[tokens, inner / ranks]``, and its part of the weight."""
    hidden, inner = sizes
    own = inner // ranks
    columns = torch.arange(own, device=device)
    rows, features = (torch.arange(count, device=device)[:, None] for count in (tokens, hidden))
    x = (columns + rows + rank) % math.ceil(inner / MOST_ONES) == 0
    weight = (columns * 3 + features + rank) % PERIOD < 7
    return x.to(torch.bfloat16), weight.to(torch.bfloat16)


def calls(x: Tensor, weight: Tensor, ranks: Ranks) -> dict[str, Callable[[], Tensor]]:
    """The candidates. On a CPU nothing can be fused."""
    ours = ranks.communicator

    def theirs() -> Tensor:
        product = functional.linear(x, weight)
        dist.all_reduce(product)
        return product

    found: dict[str, Callable[[], Tensor]] = {ranks.peer: theirs}
    if ours is not None:
        if x.is_cuda:
            found[FUSED] = lambda: row_linear(x, weight, ours, algorithm="overlapped")
        plain = "cublas" if x.is_cuda else "auto"
        found[PLAIN] = lambda: row_linear(x, weight, ours, algorithm=plain)
    return found


def work(tokens: int, sizes: tuple[int, int], ranks: Ranks) -> Work:
    """Size and count are those of the result that is summed."""
    x, weight = operands(ranks.rank, ranks.ranks, tokens, sizes, ranks.device)
    ones = x.clone(), weight.clone()
    right = torch.zeros(tokens, sizes[0], device=ranks.device)
    for rank in range(ranks.ranks):
        other_x, other_weight = operands(rank, ranks.ranks, tokens, sizes, ranks.device)
        right += functional.linear(other_x.float(), other_weight.float())

    def wrong(call: Callable[[], Tensor]) -> int:
        return ranks.sum(int((call().float() != right).sum()))

    def prepare() -> None:
        x.normal_()
        weight.normal_(std=sizes[1] ** -0.5)

    def restore() -> None:
        x.copy_(ones[0])
        weight.copy_(ones[1])

    size, count = right.numel() * x.itemsize, right.numel()
    fields = {"size": size, "count": count, "type": "bfloat16", "redop": "sum"}
    bandwidth = bus("all_reduce", ranks.ranks)
    return Work(calls(x, weight, ranks), wrong, fields, bandwidth, prepare, restore)
