"""Reductions of all dtypes, against numbers computed by Python."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import on_ranks, run_threads

from pipekernels import Communicator
from pipekernels.distributed import derived

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
RANKS = 3
FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "avg": operator.add,
    "max": max,
    "min": min,
    "product": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
BITWISE = ("and", "or", "xor")


def supported(dtype: torch.dtype, op: str) -> bool:
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if op == "avg":
        return dtype not in (torch.bool, torch.uint64)
    return op not in ("max", "min") or not dtype.is_complex


def values(rank: int, dtype: torch.dtype) -> list[Any]:
    """Of one rank. Sums and products of integers overflow; those of floats are exact."""
    if dtype == torch.bool:
        return [rank == 1, rank == 9, True, rank != 1]
    if dtype.is_complex:
        return [complex(rank, 1), complex(2, -rank), 0j, complex(-1, 3)]
    if dtype.is_floating_point:
        return [rank - 1.0, 2.0, 0.5 * rank, -1.0]
    info = torch.iinfo(dtype)
    return [info.max - rank, info.min + rank, 5 + rank, info.max // 3 * rank]


def expected(dtype: torch.dtype, op: str) -> list[Any]:
    columns = zip(*(values(rank, dtype) for rank in range(RANKS)), strict=True)
    found = [functools.reduce(FOLDS[op], column) for column in columns]
    if dtype == torch.bool:
        return [bool(value) for value in found]
    if dtype.is_floating_point or dtype.is_complex:
        return [value / RANKS if op == "avg" else value for value in found]
    info = torch.iinfo(dtype)
    if op == "avg":  # Towards zero, of what fits into 64 bits.
        wrapped = [(value + 2**63) % 2**64 - 2**63 for value in found]
        return [abs(value) // RANKS * (1 if value > 0 else -1) for value in wrapped]
    return [(value - info.min) % 2**info.bits + info.min for value in found]


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool])
@on_ranks(RANKS, run_threads)
def test_reductions(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    x = torch.tensor(values(comm.rank, dtype), dtype=dtype)
    rows = x.repeat(RANKS, 1)
    if not supported(dtype, op):
        with pytest.raises(TypeError, match=f"no reduction '{op}'"):
            derived.check(x, op)
        return
    want = torch.tensor(expected(dtype, op), dtype=dtype)
    derived.all_reduce(comm, x, op, None)
    part = torch.empty_like(x)
    derived.reduce_scatter(comm, part, rows.view(-1), op, None)
    kept = rows[0].clone()
    derived.reduce(comm, kept, op, None, 1)
    for found in (x, part, kept if comm.rank == 1 else want):
        assert found.tolist() == want.tolist()
    assert comm.rank == 1 or kept.tolist() == rows[0].tolist()
