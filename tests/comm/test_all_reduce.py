"""Collectives compared with ``support/reference.py``: bits, dtypes, layouts, memory, errors."""

import functools
import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.checks import assert_raises
from support.levels import in_gate
from support.ranks import on, on_ranks, run_processes, run_threads
from support.sweeps.collectives import ALGORITHMS, Call, make, place, same_bits
from torch import Tensor

from pipekernels import Communicator, ops


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers whose sums have rounding errors; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def random_calls(comm: Communicator, seed: int, calls: int, device: torch.device) -> None:
    """Random collectives; all ranks draw the same calls, but each its own kinds of memory."""
    for i in range(calls):
        call = Call.draw(1000 * seed + i, comm.world_size)
        make(comm, replace(call, special=call.special and device.type == "cpu"), device)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_calls_on_processes(world_size: int, device: torch.device) -> None:
    # Processes share a GPU by time slices, and wait for theirs several times per call.
    calls = 40 if device.type == "cpu" else 10
    run_processes(world_size, on(device, random_calls, world_size, calls, device))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", in_gate([2, 3, 5], [2, 3, 5, 8]))
def test_random_calls_on_threads(world_size: int, device: torch.device) -> None:
    run_threads(world_size, on(device, random_calls, 10 + world_size, 40, device))


@pytest.mark.slow
def test_large_tensors_pass_through_all_staging_buffers(device: torch.device) -> None:
    """Each algorithm needs many rounds here; the sizes are odd."""
    inputs = [values((3_000_001,), torch.float32, rank) for rank in range(3)]
    expected = reference.all_reduce(inputs)

    def on_rank(comm: Communicator) -> None:
        for algorithm in ALGORITHMS:
            for symmetric in (0, 1, 3):  # So many ranks have symmetric tensors.
                kind = "symmetric" if comm.rank < symmetric else "ordinary"
                x = place(comm, inputs[comm.rank], kind, comm.rank, device)
                assert same_bits(comm.all_reduce(x, algorithm=algorithm), expected)

    run_threads(3, on(device, on_rank))


@on_ranks(8, run_threads)
def test_gradients_are_summed_in_the_same_order(comm: Communicator, device: torch.device) -> None:
    inputs = [values((1000,), torch.float32, rank).to(device) for rank in range(8)]
    expected = {order: reference.all_reduce(inputs, "sum", order) for order in ("rank", "tree")}
    assert not expected["rank"].equal(expected["tree"])
    for order, total in expected.items():
        x = inputs[comm.rank].clone().requires_grad_()
        y = ops.all_reduce(x, comm, order=order)
        assert y.equal(total)
        y.backward(inputs[comm.rank])
        assert x.grad.equal(total)
    x = inputs[comm.rank].clone().requires_grad_()
    y = ops.reduce_scatter(x, comm, "avg", order="tree")
    assert y.equal(reference.reduce_scatter(inputs, "avg", "tree")[comm.rank])
    y.backward(torch.full_like(y, float(comm.rank)))
    assert x.grad.equal(torch.arange(8.0, device=device).repeat_interleave(125) / 8)


@on_ranks(1, run_threads)
def test_autograd_detects_writes_to_saved_tensors(comm: Communicator, device: torch.device) -> None:
    for collective in (comm.all_reduce, comm.broadcast):
        for x in (torch.ones(3, device=device), torch.ones(3, 2, device=device)[:, 0]):
            y = (x * torch.ones(3, device=device, requires_grad=True)).sum()
            collective(x)
            assert_raises(RuntimeError, "modified by an inplace operation", y.backward)


@on_ranks(2, run_threads)
def test_leaves_inference_tensors_and_lazy_negation(
    comm: Communicator, device: torch.device
) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    assert comm.all_reduce(leaf) is leaf
    assert leaf.tolist() == [2.0] * 3
    strided = torch.ones(3, 2, device=device, requires_grad=True)[:, 0]
    assert comm.all_reduce(strided).tolist() == [2.0] * 3
    with torch.inference_mode():
        assert comm.all_reduce(torch.ones(3, device=device)).tolist() == [2.0] * 3
        strided = torch.ones(3, 2, device=device)[:, 0]
    assert comm.all_reduce(strided).tolist() == [2.0] * 3  # Also outside of inference mode.
    negated = torch.tensor([1 + 2j, 3 + 4j], device=device).conj().imag
    assert negated.is_neg()
    assert comm.all_reduce(negated).tolist() == [-4.0, -8.0]
    conjugated = torch.tensor([1 + 2j], device=device).conj()
    assert comm.all_gather(conjugated).tolist() == [1 - 2j, 1 - 2j]


@on_ranks(2, run_threads)
def test_channels_last_and_transposed_tensors_are_reduced_by_element(
    comm: Communicator, device: torch.device
) -> None:
    inputs = [values((2, 3, 4, 5), torch.float32, rank).to(device) for rank in range(2)]
    x = inputs[comm.rank].clone()
    x = x.contiguous(memory_format=torch.channels_last) if comm.rank else x
    assert torch.equal(comm.all_reduce(x), inputs[0] + inputs[1])
    x = inputs[comm.rank].transpose(0, 3).contiguous().transpose(0, 3)
    assert torch.equal(comm.reduce_scatter(x), (inputs[0] + inputs[1])[comm.rank :][:1])


@on_ranks(2, run_threads)
def test_out(comm: Communicator, device: torch.device) -> None:
    empty = functools.partial(torch.empty, device=device)
    x = torch.arange(6.0, device=device).view(2, 3) + comm.rank
    whole, part = empty(4, 3), empty(1, 3)
    assert comm.all_gather(x, out=whole) is whole
    assert whole.equal(torch.cat([x - comm.rank, x - comm.rank + 1]))
    assert comm.reduce_scatter(x, out=part) is part
    assert part.equal((2 * x - 2 * comm.rank + 1)[comm.rank :][:1])

    expected = whole.clone()
    own = whole.zero_()[2 * comm.rank :][:2].copy_(x)
    assert comm.all_gather(own, out=whole).equal(expected)  # In place.
    comm.all_gather(x.t(), out=empty(6, 2))

    for bad in (empty(3, 3), empty(3, 4).t(), whole.double(), whole.to("meta")):
        with pytest.raises(ValueError, match=r"out must be .* shape \(4, 3\) and torch.float32"):
            comm.all_gather(x, out=bad)
    rows = torch.zeros(5, 3, device=device)
    for call in (
        lambda: comm.all_gather(rows[:2], out=rows[1:]),
        lambda: comm.reduce_scatter(rows[:2], out=rows[1:2]),
    ):
        assert_raises(ValueError, "out must not overlap the input", call)
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    y = (weight * whole).sum()
    comm.all_gather(x, out=whole)
    assert_raises(RuntimeError, "modified by an inplace operation", y.backward)


@on_ranks(2, run_threads)
def test_names_need_not_be_interned_strings(comm: Communicator) -> None:
    results = {"sum": 3.0, "avg": 1.5, "max": 2.0, "min": 1.0}
    for op, algorithm in itertools.product(results, ALGORITHMS):
        for names in ((op, algorithm), (op.encode().decode(), algorithm.encode().decode())):
            x = torch.full((5,), comm.rank + 1.0)
            assert comm.all_reduce(x, names[0], algorithm=names[1]).tolist() == [results[op]] * 5


def test_bad_arguments_raise_before_any_communication() -> None:
    x, scalar = torch.ones(4), torch.ones(())
    comm = Communicator.threads(2)[0]  # Any communication would wait for rank 1.
    reduce, scatter, broadcast = comm.all_reduce, comm.reduce_scatter, comm.broadcast
    for call in (reduce, scatter, broadcast, comm.all_gather):
        for value in ([1.0], np.ones(2), None):
            assert_raises(TypeError, "works on tensors, got .*; pass torch.as_tensor", call, value)
    assert_raises(TypeError, "torch.int8.*convert.*torch.bfloat16", reduce, x.to(torch.int8))
    assert_raises(TypeError, "torch.complex64", scatter, x.to(torch.complex64))
    assert_raises(ValueError, "op must be one of sum, avg, max, min, got 'mean'", reduce, x, "mean")
    assert_raises(
        ValueError, "algorithm must be one of .*ring, got 'tree'", reduce, x, algorithm="tree"
    )
    for call in (reduce, scatter):
        assert_raises(
            ValueError, "order must be one of rank, tree, got 'ring'", call, x, order="ring"
        )
        op = sys.intern("sum in tree order")
        assert_raises(ValueError, "op must be one of .*, min, got 'sum in tree order'", call, x, op)
    assert_raises(ValueError, "average of int64", reduce, x.long(), "avg")
    assert_raises(ValueError, "average of int32", scatter, x.int(), "avg")
    assert_raises(ValueError, r"2 equal slices.*\(5,\)", scatter, torch.ones(5))
    assert_raises(ValueError, "2 equal slices", scatter, scalar)
    assert_raises(ValueError, "dimension 0", comm.all_gather, scalar)
    for src in (-1, 2):
        assert_raises(ValueError, f"src must be a rank in 0..1, got {src}", broadcast, x, src)
    assert_raises(TypeError, "src must be an int, got str", broadcast, x, "0")
    for call in (reduce, broadcast):
        assert_raises(
            ValueError, r"several elements in one place, got shape \(2, 4\)", call, x.expand(2, 4)
        )


def tensors_without_memory() -> list[torch.Tensor]:
    freed = torch.ones(8)
    views = [freed[:4], freed[4:], freed[::2]]
    freed.untyped_storage().resize_(0)
    wrapped = torch._to_functional_tensor(torch.ones(4))
    return [*views, wrapped, torch._efficientzerotensor(4)]


def test_tensors_without_plain_memory_are_refused() -> None:
    comm = Communicator.threads(2)[0]  # Any communication would wait for rank 1.
    x, no_memory = torch.eye(4), r"of shape \(4,\) has no memory of its own"
    for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.broadcast):
        assert_raises(ValueError, "CPU and CUDA tensors, got one on meta", call, x.to("meta"))
        dense = r"layout torch.sparse_coo and torch.float32; pass tensor.to_dense\(\)"
        assert_raises(ValueError, dense, call, x.to_sparse())
        for tensor in tensors_without_memory():
            assert_raises(ValueError, no_memory, call, tensor)
    quantized = torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)
    operations: list[Any] = [ops.all_reduce, ops.all_gather, ops.broadcast, ops.reduce_scatter]
    operations = [functools.partial(operation, comm=comm) for operation in operations]
    for move in (comm.all_gather, comm.broadcast, *operations[:3]):
        assert_raises(ValueError, r"torch.qint8; pass .* tensor.dequantize\(\)", move, quantized)
    for tensor in tensors_without_memory()[:3]:
        for operation in operations:
            assert_raises(ValueError, no_memory, operation, tensor)
        if tensor.is_contiguous():
            assert_raises(ValueError, no_memory, comm.all_gather, torch.ones(2), out=tensor)
