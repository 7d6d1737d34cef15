"""Random collectives and their expected results; the same on all ranks for the same seed."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pipekernels import Communicator, reference

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
KINDS = ("ordinary", "symmetric", "strided", "misaligned")


class WrongResult(AssertionError):
    """A collective returned something else than the oracle."""


@dataclass(frozen=True)
class Call:
    """One collective, as all ranks make it."""

    operation: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: str
    src: int
    kinds: tuple[str, ...]
    special: bool
    seed: int
    algorithm: str = "auto"

    @classmethod
    def draw(cls, seed: int, world_size: int, elements: int) -> Call:
        """The call of this seed; tensors of up to ``elements`` elements, mostly small ones."""
        generator = random.Random(seed)
        operation = generator.choice(
            ["all_reduce"] * 5 + ["reduce_scatter", "all_gather", "broadcast"]
        )
        dtype = generator.choice(FLOATS + INTEGERS)
        op = generator.choice(["sum", "sum", "avg", "max", "min"])
        if dtype in INTEGERS and op == "avg":
            op = "sum"
        count = int(elements ** generator.uniform(0, 1)) - generator.choice([0, 0, 0, 1])
        shape = generator.choice([[count], [count], [3, count // 3], [2, 1, count // 2]])
        if operation == "reduce_scatter":
            shape[0] = world_size * (-(-shape[0] // world_size))
        kinds = generator.choice([("ordinary",), ("symmetric",), KINDS])
        src = generator.randrange(world_size)
        special = generator.random() < 0.2
        order = generator.choice(["rank", "tree"])
        return cls(operation, op, dtype, tuple(shape), order, src, kinds, special, seed)

    def expected(self, rank: int, world_size: int) -> Tensor:
        """The oracle's answer for ``rank``."""
        if self.operation == "broadcast":
            return contents(self, self.src)
        inputs = [contents(self, r) for r in range(world_size)]
        if self.operation == "all_reduce":
            return reference.all_reduce(inputs, self.op, self.order)
        if self.operation == "reduce_scatter":
            return reference.reduce_scatter(inputs, self.op, self.order)[rank]
        return reference.all_gather(inputs)

    def tensor(self, comm: Communicator, own: random.Random) -> Tensor:
        """This rank's input, in memory that ``own`` picks."""
        return place(comm, contents(self, comm.rank), own.choice(self.kinds), own)

    def run(self, comm: Communicator, tensor: Tensor) -> Tensor:
        """Make the call."""
        if self.operation == "all_reduce":
            return comm.all_reduce(tensor, self.op, algorithm=self.algorithm, order=self.order)
        if self.operation == "reduce_scatter":
            return comm.reduce_scatter(tensor, self.op, order=self.order)
        if self.operation == "all_gather":
            return comm.all_gather(tensor)
        if self.operation == "broadcast":
            return comm.broadcast(tensor, self.src)
        comm.barrier()
        return tensor


@functools.lru_cache(maxsize=16)  # Shared by threads, and by the calls of one case.
def contents(call: Call, rank: int) -> Tensor:
    """The input of ``rank``: numbers whose sums round; with ``special`` also infinities and NaN."""
    generator = torch.Generator().manual_seed(call.seed * 64 + rank)
    dtype = call.dtype
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, call.shape, dtype=dtype, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.randn(call.shape, generator=generator, dtype=wide).to(dtype)
    if call.special and values.numel() > 0:
        info = torch.finfo(dtype)
        odd = [math.inf, math.nan, -math.inf, -0.0, 0.0, info.max, info.tiny / 4]
        where = torch.randint(values.numel(), (20,), generator=generator)
        which = torch.randint(len(odd), (20,), generator=generator)
        values.view(-1)[where] = torch.tensor(odd, dtype=dtype)[which]
    return values


def check(result: Tensor, expected: Tensor, special: bool) -> None:
    """Compare bit by bit; with special values zeros may differ in sign, and NaNs in bits.

    Raises:
        WrongResult: they differ.
    """
    if result.shape == expected.shape and torch.equal(bits(result), bits(expected)):
        return
    if result.shape != expected.shape:
        raise WrongResult(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    wrong = result != expected
    if special:
        wrong &= ~(result.isnan() & expected.isnan())
    if wrong.any() or not special:
        raise WrongResult(f"{int(wrong.sum())} of {wrong.numel()} elements differ from the oracle")


def place(comm: Communicator, values: Tensor, kind: str, own: random.Random) -> Tensor:
    """A copy of ``values`` in memory of this kind, at a random alignment."""
    count, dtype, shift = values.numel(), values.dtype, own.randrange(8)
    if kind == "symmetric":
        tensor = comm.empty(count + shift, dtype=dtype)[shift:].view(values.shape)
    elif kind == "strided":
        tensor = torch.empty((*values.shape, 2), dtype=dtype)[..., 1]
    elif kind == "misaligned" and count > 0:
        memory = bytearray(count * dtype.itemsize + shift)
        tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=shift)
        tensor = tensor.view(values.shape)
    else:
        tensor = torch.empty(count + shift, dtype=dtype)[shift:].view(values.shape)
    return tensor.copy_(values)


def bits(tensor: Tensor) -> Tensor:
    """All bytes of ``tensor``, in the order of its elements."""
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8)  # A clone may keep a stride of 2.
