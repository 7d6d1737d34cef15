"""Random calls of ``_C`` on tensors: each must raise, or write to no memory but its own.

``python -m support.random_calls`` makes them in a process of its own. Each call is printed first,
so the last line names one that crashes.
"""

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.bad_calls import HUGE

INTS = [
    *(-(1 << bits) for bits in (63, 31, 8, 0)),
    *range(8),
    *(21, 22, 255, 256, 500),
    *(HUGE, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70),
]
WRONG = [None, "sum", b"", 1.5, float("nan"), [], (), {}, object(), int, torch.zeros(1)]


def draw(rng: random.Random, *likely: Any) -> Any:
    """Mostly one of ``likely``, so that calls reach the checks of other arguments."""
    pool = rng.choices([likely, INTS, WRONG], [6, 2, 1])[0]
    return rng.choice(pool)


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return "done"


class Arena:
    """Tensors cut out of one allocation, which is compared to detect writes outside of them."""

    def __init__(self, seed: int) -> None:
        # Zeros and ones, so that all bytes are also valid bools.
        generator = torch.Generator().manual_seed(seed)
        self.memory = torch.randint(0, 2, (1 << 14,), dtype=torch.uint8, generator=generator)
        self.before = self.memory.clone()
        self.cuts: list[tuple[Tensor, Tensor]] = []  # The same cut from ``memory`` and ``before``.
        self._end = 64

    def cut(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, bytes_ = self._end, math.prod(shape) * dtype.itemsize
        self._end = (begin + bytes_ + 127) // 64 * 64
        both = [
            memory[begin : begin + bytes_].view(dtype).view(shape)
            for memory in (self.memory, self.before)
        ]
        self.cuts.append((both[0], both[1]))
        return both[0]

    def check(self, written: set[int]) -> None:
        """Check that only tensors with these ``data_ptr()`` were written to."""
        for tensor, before in self.cuts:
            if tensor.data_ptr() in written:
                tensor.copy_(before)
        assert self.memory.equal(self.before)


class Subclass(Tensor):
    pass


def call_on_tensors(native: Any) -> Counter[str]:
    rng = random.Random(2)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool]
    strange = [*WRONG, torch.zeros(1).expand(1 << 62), torch.ones(2, 3)]
    counts = Counter[str]()
    for i in range(1200):
        arena = Arena(i)
        dtype = rng.choice(dtypes)
        part_dtype = rng.choice([dtype, rng.choice(dtypes)])
        split, width = rng.random() < 0.5, rng.choice([1, 1, 2])
        sizes = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        total = rng.choice([sum(sizes)] * 4 + [rng.randrange(8)])
        columns = rng.choice([(), (3,), (2, 5)])
        wholes: list[Any] = [arena.cut((total, *columns), dtype) for _ in range(width)]
        parts: list[Any] = [
            arena.cut((size, *rng.choice([columns] * 9 + [(4,)])), part_dtype)
            for size in sizes
            for _ in range(width)
        ]
        written = {tensor.data_ptr() for tensor in (parts if split else wholes)}
        for tensors in (wholes, parts):
            if rng.random() < 0.2:  # The extension reads a subclass through its Python attributes.
                tensors[0] = tensors[0].as_subclass(Subclass)
            if rng.random() < 0.1:
                tensors[rng.randrange(len(tensors))] = rng.choice(strange)
        dim, threads_ = draw(rng, 0), draw(rng, 1, 2)
        kinds = [[getattr(x, "shape", x) for x in tensors] for tensors in (wholes, parts)]
        print(f"{i}: {split, dim, *kinds, threads_, dtype, part_dtype}", flush=True)
        copy = functools.partial(native.copy_micro_batches, split, dim, wholes, parts, threads_)
        counts[outcome(copy)] += 1
        arena.check(written)
        for call in (
            functools.partial(native.are_plain_and_fit, dim, draw(rng, 1, 2), parts),
            functools.partial(native.are_plain, draw(rng, wholes, parts)),
            functools.partial(native.check_memory, rng.choice([*wholes, *WRONG])),
            functools.partial(native.mark_changed, rng.choice([*wholes, *WRONG])),
        ):
            outcome(call)
    return counts


if __name__ == "__main__":
    from pipekernels import _backend

    print(json.dumps(call_on_tensors(_backend.load())))
