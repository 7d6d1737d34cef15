"""The table of collectives: random calls, checked bit by bit against one oracle.

Threads, processes, several hosts and the backend of torch.distributed draw their calls here; ranks
make the same calls, or different ones.
"""

import functools
import math
import random
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions

from pipekernels import Communicator
from support import reference
from support.ranks import run_processes, run_threads

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
OTHERS = (torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float8_e4m3fn)
FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
OPS = ("sum", "sum", "avg", "max", "min")
OPERATIONS = (*["all_reduce"] * 5, "reduce_scatter", "all_gather", "broadcast")
GROUP_OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter list", "broadcast", "scatter"),
    *("all_gather", "all_gather list", "gather"),
)
KINDS = ("ordinary", "symmetric", "strided", "misaligned", "parameter")
CPU = torch.device("cpu")
WORLD_SIZES = range(2, 9)
ELEMENTS = 300_000
BATCH = 200  # Cases that share a communicator.

# ---- one call ----


@dataclass(frozen=True)
class Call:
    """One collective, as all ranks make it."""

    operation: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: str
    src: int
    kinds: tuple[str, ...] = ("ordinary",)
    special: bool = False
    whole: bool = False  # Floats are small whole numbers, whose sums are exact in any order.
    seed: int = 0
    algorithm: str = "auto"

    @classmethod
    def draw(
        cls, seed: int, world_size: int, elements: int = ELEMENTS, group: bool = False
    ) -> "Call":
        """The call of this seed; tensors of up to ``elements`` elements, mostly small ones.

        Of a communicator, or, with ``group``, of torch.distributed, which has more dtypes and
        reductions.
        """
        generator = random.Random(seed)
        operation = generator.choice(GROUP_OPERATIONS if group else OPERATIONS)
        dtype = generator.choice(FLOATS + INTEGERS + OTHERS * (group or "reduce" not in operation))
        op = generator.choice(OPS + tuple(FOLDS) * group)
        if not _has(dtype, op) or (not group and op == "avg" and dtype in INTEGERS):
            op = "sum"
        count = int(elements ** generator.uniform(0, 1)) - generator.choice([0, 0, 0, 1])
        shape = generator.choice([[count], [count], [3, count // 3], [2, 1, count // 2]])
        if "scatter" in operation:
            shape[0] = world_size * (-(-shape[0] // world_size))
        kinds = generator.choice([("ordinary",), ("symmetric",), KINDS])
        src, order = generator.randrange(world_size), generator.choice(["rank", "tree"])
        order = "rank" if group else order
        special = generator.random() < 0.2
        return cls(operation, op, dtype, tuple(shape), order, src, kinds, special, group, seed)

    def anywhere(self) -> "Call":
        """The same call, for ranks on several hosts."""
        kinds = tuple(kind for kind in self.kinds if kind != "symmetric") or ("ordinary",)
        return replace(self, order="rank", special=False, whole=True, kinds=kinds)

    def expected(self, rank: int, world_size: int) -> Tensor:
        """The oracle's answer for ``rank``."""
        inputs = [contents(self, r) for r in range(world_size)]
        name = self.operation.removesuffix(" list")
        if name == "broadcast":
            return inputs[self.src]
        if name == "scatter":
            return inputs[self.src].chunk(world_size)[rank]
        if name in ("reduce", "gather") and rank != self.src:
            return inputs[rank]
        if "gather" in name:
            return torch.cat(inputs)
        total = self._reduced(inputs)
        return total.chunk(world_size)[rank] if name == "reduce_scatter" else total

    def _reduced(self, inputs: list[Tensor]) -> Tensor:
        if self.op in FOLDS:
            narrow = self.dtype.is_floating_point and self.dtype.itemsize < 4
            wide = torch.float32 if narrow else self.dtype  # As reductions accumulate.
            terms = [each.to(wide) for each in inputs]
            return functools.reduce(FOLDS[self.op], terms).to(self.dtype)
        if self.op == "avg" and not self.dtype.is_floating_point:  # Towards zero, as NCCL does.
            total = reference.all_reduce([each.long() for each in inputs])
            return total.div(len(inputs), rounding_mode="trunc").to(self.dtype)
        if self.dtype == torch.float8_e4m3fn:
            return reference.all_reduce([each.float() for each in inputs]).to(self.dtype)
        return reference.all_reduce(inputs, self.op, self.order)

    def tensor(self, comm: Communicator, own: random.Random, device: torch.device = CPU) -> Tensor:
        """This rank's input, in memory that ``own`` picks."""
        kinds = [kind for kind in self.kinds if device == CPU or kind != "misaligned"]
        return place(comm, contents(self, comm.rank), own.choice(kinds), own.randrange(8), device)

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


def _has(dtype: torch.dtype, op: str) -> bool:
    """Whether torch.distributed has this reduction; only sums of float8 are in the table."""
    if op in ("and", "or", "xor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype in (torch.complex64, torch.float8_e4m3fn):
        return op == "sum"
    return op != "avg" or dtype != torch.bool


@functools.lru_cache(maxsize=16)  # Shared by threads, and by the calls of one case.
def contents(call: Call, rank: int) -> Tensor:
    """The input of ``rank``: numbers whose sums round; with ``special`` also infinities and NaN."""
    generator = torch.Generator().manual_seed(call.seed * 64 + rank)
    dtype = call.dtype
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, call.shape, dtype=dtype, generator=generator)
    if dtype in OTHERS:
        return torch.randint(0, 100, call.shape, generator=generator).to(dtype)
    values = torch.randn(call.shape, generator=generator, dtype=torch.float64)
    # Whole numbers without -0.0: which zero is the minimum depends on the order.
    values = ((4 * values).round() + 0.0 if call.whole else values).to(dtype)
    if call.special and values.numel() > 0:
        info = torch.finfo(dtype)
        odd = [math.inf, math.nan, -math.inf, -0.0, 0.0, info.max, info.tiny / 4]
        where = torch.randint(values.numel(), (20,), generator=generator)
        which = torch.randint(len(odd), (20,), generator=generator)
        values.view(-1)[where] = torch.tensor(odd, dtype=dtype)[which]
    return values


def place(
    comm: Communicator, values: Tensor, kind: str, shift: int, device: torch.device = CPU
) -> Tensor:
    """A copy of ``values`` in memory of that kind, ``shift`` elements or bytes into its storage."""
    count, dtype = values.numel() + shift, values.dtype
    if kind == "misaligned" and values.numel() > 0:
        memory = bytearray(values.nbytes + shift)
        tensor = torch.frombuffer(memory, dtype=dtype, count=values.numel(), offset=shift)
        tensor = tensor.view(values.shape)
    elif kind == "strided":
        tensor = torch.zeros((*values.shape, 2), dtype=dtype, device=device)[..., 1]
    else:
        empty = comm.empty if kind == "symmetric" else torch.empty
        tensor = empty(count, dtype=dtype, device=device)[shift:].view(values.shape)
    tensor.copy_(values)
    return nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor


def bits(tensor: Tensor) -> Tensor:
    """All bytes of ``tensor``, in the order of its elements."""
    # cat() copies: one strided element counts as contiguous, but cannot be viewed as bytes.
    return torch.cat([tensor.detach().cpu().reshape(-1)]).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def check(result: Tensor, expected: Tensor, special: bool = False) -> None:
    """Compare bit by bit; with special values zeros may differ in sign, and NaNs in bits."""
    assert result.shape == expected.shape, f"shape {result.shape} instead of {expected.shape}"
    if same_bits(result, expected):
        return
    result = result.detach().cpu()
    wrong = result != expected
    if special:
        wrong &= ~(result.isnan() & expected.isnan())
    differ = f"{int(wrong.sum())} of {wrong.numel()} elements differ from the oracle"
    assert special and not wrong.any(), differ


# ---- ranks that agree ----


def check_neighbours(tensor: Tensor) -> None:
    """Nothing was written between the elements of a ``strided`` tensor."""
    whole = tensor._base
    if whole is not None and whole.shape == (*tensor.shape, 2):
        assert not bits(whole[..., 0]).any(), "memory between the elements has changed"


def make(comm: Communicator, call: Call, device: torch.device = CPU) -> int:
    """Make a call by every algorithm, in other memory each time; the checksum of all results."""
    expected = call.expected(comm.rank, comm.world_size)
    own = random.Random(f"{call.seed} {comm.rank}")
    checksums = set()
    for algorithm in ways(call):
        x = call.tensor(comm, own, device)
        try:
            result = replace(call, algorithm=algorithm).run(comm, x)
            check(result, expected, call.special)
            in_place = call.operation in ("all_reduce", "broadcast")
            assert (result is x) == in_place, "the result is the input, or is not"
            assert in_place or same_bits(x, contents(call, comm.rank)), "the input has changed"
            check_neighbours(x)
            checksums.add(zlib.crc32(bits(result).numpy().tobytes()))
            assert len(checksums) == 1, "the bits differ from those of another run or algorithm"
        except AssertionError as error:
            where = f"{algorithm}, rank {comm.rank} of {comm.world_size}"
            raise AssertionError(f"{where}: {error}; {call}") from None
    return checksums.pop()


def ways(call: Call) -> tuple[str, ...]:
    """The algorithms by which a call is made."""
    return (*ALGORITHMS, "auto") if call.operation == "all_reduce" else ("auto", "auto")


def make_in_group(call: Call, async_op: bool) -> None:
    """Make a call by torch.distributed, whose ranks may differ in the memory and, where the result
    is in place, in the shape of their tensors. Lists are empty again before the call may end."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), cast(Any, dist.group.WORLD)
    own = random.Random(f"{call.seed} {rank} {async_op}")
    op, root = REDUCE_OPS[call.op], rank == call.src
    option: Any = {"async_op": async_op}
    x, expected = call.tensor(group._comm, own), call.expected(rank, size)
    slices = list(x.tensor_split(size)) if "scatter" in call.operation else []
    in_place = call.operation in ("all_reduce", "reduce", "broadcast")
    if in_place and x.is_contiguous() and own.random() < 0.3:
        x, expected = x.view(-1), expected.reshape(-1)

    def output(like: Tensor) -> Tensor:
        return place(group._comm, torch.zeros_like(like), own.choice(KINDS), own.randrange(8))

    outputs, received = [x], list[Tensor]()
    match call.operation:
        case "all_reduce":
            work = dist.all_reduce(x, op, **option)
        case "reduce":
            work = dist.reduce(x, call.src, op, **option)
        case "broadcast":
            work = dist.broadcast(x, call.src, **option)
        case "scatter":
            outputs = [output(slices[0])]
            work = dist.scatter(outputs[0], slices if root else None, call.src, **option)
        case "reduce_scatter list":
            outputs = [output(slices[0])]
            work = dist.reduce_scatter(outputs[0], slices, op, **option)
        case "reduce_scatter":
            outputs = [output(slices[0])]
            if async_op:
                work = dist.reduce_scatter_tensor(outputs[0], x, op, async_op=True)
            else:
                options = waited(dist.ReduceScatterOptions, reduceOp=op)
                work = group._reduce_scatter_base(outputs[0], x, options)
        case "all_gather":
            outputs = [output(torch.cat([x] * size))]
            if async_op:
                work = dist.all_gather_into_tensor(outputs[0], x, async_op=True)
            else:
                work = group._allgather_base(outputs[0], x, waited(AllgatherOptions))
        case "all_gather list":
            outputs = [output(x) for _ in range(size)]
            work = dist.all_gather(received := [*outputs], x, **option)
        case _:
            outputs = [output(x) for _ in range(size)] if root else [x]
            received = [*outputs]
            work = dist.gather(x, received if root else None, call.src, **option)
    for given in (slices, received):
        given.clear()
    if work is not None:
        work.wait()
    try:
        check(torch.cat(outputs) if len(outputs) > 1 else outputs[0], expected, call.special)
        for tensor in (x, *outputs):
            check_neighbours(tensor)
        assert in_place or same_bits(x, contents(call, rank)), "the input has changed"
    except AssertionError as error:
        raise AssertionError(
            f"rank {rank} of {size}, async_op={async_op}: {error}; {call}"
        ) from None


def waited(options: Callable[[], Any], **fields: Any) -> Any:
    """Options of a call that its caller waits for, which some functions of torch do not set."""
    made = options()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(made, name, value)
    return made


def make_all(comm: Communicator, calls: Sequence[Call]) -> list[int]:
    return [make(comm, call) for call in calls]


def sums(seed: int, cases: Sequence[int]) -> dict[str, Any]:
    """A row for all of them, on processes and on threads.

    Raises:
        AssertionError: a result is wrong; the message has the call.
    """
    collectives = 0
    for n in WORLD_SIZES:
        own = [case for case in cases if case % len(WORLD_SIZES) + 2 == n]
        for first in range(0, len(own), BATCH):
            print(f"sums on {n} ranks, {first} of {len(own)}", file=sys.stderr)
            calls = [Call.draw(seed * 1_000_000 + i, n) for i in own[first : first + BATCH]]
            by_processes = run_processes(n, make_all, calls)
            by_threads = run_threads(n, functools.partial(make_all, calls=calls))
            assert by_processes == by_threads, "processes and threads give different bits"
            for call, *checksums in zip(calls, *by_processes, strict=True):
                same = call.operation == "reduce_scatter" or len(set(checksums)) == 1
                assert same, f"the bits differ between ranks; {call}"
                collectives += 2 * len(ways(call))
    outcome = "all bits equal, on all ranks, and to the oracle"
    return row("one sum on 2 to 8 ranks", len(cases), collectives, outcome)


def row(
    trial: str, runs: int, collectives: int, outcome: str, delays: Sequence[float] = ()
) -> dict[str, Any]:
    """What a result file says about a trial."""
    found = {"trial": trial, "runs": runs, "collectives": collectives, "outcome": outcome}
    if len(delays) < 2:
        return found
    p99 = statistics.quantiles(delays, n=100, method="inclusive")[-1]
    return {**found, "p50": statistics.median(delays), "p99": p99, "max": max(delays)}


# ---- ranks that make different calls ----

DIFFERING = 3  # Ranks, of which one makes another call, or two calls in another order.
DOMAINS: dict[str, tuple[Any, ...]] = {
    "operation": ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    "shape": (
        *((DIFFERING * count,) for count in (0, 1, 10, 11, 1000, 100_000, 300_001)),
        *((DIFFERING, 10), (DIFFERING * 2, 5)),  # Of as many elements.
    ),
    "dtype": (torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.int64),
    "op": ("sum", "max", "min"),
    "order": ("rank", "tree"),
    "algorithm": ALGORITHMS,
    "src": tuple(range(DIFFERING)),
}
# The fields in which calls of an operation differ, by name of the change.
FIELDS = {
    "all_reduce": ("shape", "dtype", "op", "order of sums", "algorithm"),
    "reduce_scatter": ("shape", "dtype", "op", "order of sums"),
    "all_gather": ("shape", "dtype"),
    "broadcast": ("shape", "dtype", "src"),
    "barrier": (),
}


def draw_different(generator: random.Random) -> tuple[list[list[Call]], str]:
    """The calls of each rank, which differ between ranks, and the name of the change."""
    call = Call(**{name: generator.choice(domain) for name, domain in DOMAINS.items()})
    change = generator.choice(sorted([*FIELDS[call.operation], "operation", "order"]))
    field = {"order of sums": "order", "order": "operation"}.get(change, change)
    if field == "order":
        call = replace(call, op="sum")  # An order is that of sums.
    others = [value for value in DOMAINS[field] if value != getattr(call, field)]
    other = replace(call, **{field: generator.choice(others)})
    calls = [[call, other] if change == "order" else [call] for _ in range(DIFFERING)]
    calls[generator.randrange(DIFFERING)] = [other, call] if change == "order" else [other]
    return calls, change


def differ(comm: Communicator, seed: int, cases: range, device: torch.device = CPU) -> int:
    """The number of mismatches, each of which must be reported on this rank."""
    reported = 0
    for case in cases:
        calls, change = draw_different(random.Random(f"{seed} {case}"))
        for call in calls[comm.rank]:
            with pytest.raises(ValueError, match="the ranks call different collectives") as caught:
                call.run(comm, torch.ones(call.shape, dtype=call.dtype, device=device))
            for rank in range(DIFFERING if change != "order" else 0):
                assert f"rank {rank} {calls[rank][0].operation}" in str(caught.value), calls
            reported += 1
        assert comm.all_reduce(torch.ones(5, device=device)).tolist() == [DIFFERING] * 5
    return reported


def draw_different_in_group(generator: random.Random, size: int) -> tuple[Call, Call]:
    """Two calls of torch.distributed that differ in one thing."""
    while True:
        call, other = (
            Call.draw(generator.randrange(2**40), size, 300, group=True) for _ in range(2)
        )
        field = generator.choice(("operation", "op", "dtype", "shape", "src"))
        other = replace(call, **{field: getattr(other, field)})
        divides = "scatter" not in other.operation or other.shape[0] % size == 0
        if divides and _has(other.dtype, other.op) and _identity(call) != _identity(other):
            return call, other


def _identity(call: Call) -> tuple[Any, ...]:
    """What torch.distributed compares."""
    name = call.operation.removesuffix(" list")
    root = call.src if name in ("reduce", "broadcast", "scatter", "gather") else None
    return name, call.dtype, math.prod(call.shape), call.op if "reduce" in name else None, root


def differ_in_group(seed: int, cases: int) -> None:
    """Make different calls by torch.distributed, each of which must be reported on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in range(cases):
        generator = random.Random(f"{seed} {case} {size}")
        call, other = draw_different_in_group(generator, size)
        own = other if rank == generator.randrange(size) else call
        with pytest.raises(ValueError, match="the ranks call different collectives"):
            make_in_group(own, async_op=case % 2 == 0)


def mismatches(seed: int, cases: int) -> dict[str, Any]:
    """A row for all cases, half of them on processes.

    Raises:
        AssertionError: a mismatch was not reported on all ranks.
    """
    first, second = range(0, cases, 2), range(1, cases, 2)
    by_processes = run_processes(DIFFERING, differ, seed, first)
    by_threads = run_threads(DIFFERING, lambda comm: differ(comm, seed, second))
    for found in (by_processes, by_threads):
        assert len(set(found)) == 1, f"the ranks count different mismatches: {found}"
    reported = by_processes[0] + by_threads[0]
    outcome = "reported on all ranks, which go on"
    return row("different calls on 3 ranks", cases, reported, outcome)
