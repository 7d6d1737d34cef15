"""On what the bits of torch's results on a CPU may not depend.

Sharded layers compute parts of what the full layers do, with the same bits if these hold.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytestmark = [pytest.mark.slow, pytest.mark.weekly]

# A question draws one case: what it is, and two results that must have the same bits.
Case = tuple[str, Tensor, Tensor]
Question = Callable[[random.Random, torch.dtype], Case]

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
QUESTIONS: dict[str, Question] = {}


def question(text: str) -> Callable[[Question], Question]:
    """Register a question: "operation: what is changed"."""

    def register(ask: Question) -> Question:
        QUESTIONS[text] = ask
        return ask

    return register


def first_difference(question: Question, dtype: torch.dtype, cases: int) -> str | None:
    """The first of ``cases`` random cases whose two results have other bits."""
    rng = random.Random(f"{question.__name__} {dtype}")
    torch.manual_seed(rng.randrange(2**32))
    for _ in range(cases):
        description, a, b = question(rng, dtype)
        assert a.shape == b.shape and a.dtype == b.dtype, description
        if not torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))):
            return description
    return None


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def moved(t: Tensor, elements: int) -> Tensor:
    """A copy whose address is ``elements`` behind what torch's allocator aligns to 64 bytes."""
    copy = t.new_empty(t.numel() + elements)[elements:].view(t.shape)
    return copy.copy_(t)


def in_place_slab(t: Tensor, slabs: int, index: int) -> Tensor:
    """A copy whose rows are those of a slab of a matrix with ``slabs`` times as many columns."""
    wide = t.new_zeros(t.shape[0], slabs * t.shape[1])
    slab = wide[:, index * t.shape[1] : (index + 1) * t.shape[1]]
    return slab.copy_(t)


def with_threads(count: int, call: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def some(rng: random.Random, size: int) -> tuple[int, int]:
    """A range that is neither empty nor, where possible, all."""
    begin = rng.randrange(size)
    return (begin, rng.randint(begin + 1, size)) if begin else (0, max(1, rng.randrange(size)))


def operands(rng: random.Random, dtype: torch.dtype, unit: int = 1) -> tuple[Tensor, Tensor, str]:
    """x ``[M, K]``, W ``[N, K]``, K a multiple of ``unit``, and what they are."""
    large = rng.random() < 0.03
    m = rng.choice([rng.randint(1, 9), rng.randint(1, 64), 256 if large else 8])
    n = rng.choice([rng.randint(1, 20), rng.randint(1, 150), 8 * rng.randint(1, 12)])
    k = rng.choice([rng.randint(1, 40), rng.randint(1, 400), 16 * rng.randint(1, 24)])
    if large:
        n, k = rng.choice([512, 1000, 1376]), rng.choice([512, 1000, 1376, 4096])
    k = max(1, k // unit) * unit
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype), f"M={m} N={n} K={k}"


@question("product: called again")
def again(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype)
    return shapes, x @ w.t(), x.clone() @ w.clone().t()


@question("product: addresses moved by multiples of 16 bytes")
def aligned_addresses(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype)
    by = [16 * rng.randint(0, 4) // x.element_size() for _ in range(2)]
    return f"{shapes}, elements {by}", x @ w.t(), moved(x, by[0]) @ moved(w, by[1]).t()


@question("product: x and W slabs of multiples of 64 bytes, read in place")
def aligned_slabs(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype, unit=64 // dtype.itemsize)
    slabs = rng.choice([2, 4, 8])
    a, b = (in_place_slab(t, slabs, rng.randrange(slabs)) for t in (x, w))
    return f"{shapes}, {slabs} slabs", x @ w.t(), a @ b.t()


@question("product: several at once, on threads that have called set_num_threads")
def beside_others(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype)
    y, threads = x @ w.t(), torch.get_num_threads()
    with ThreadPoolExecutor(2, initializer=lambda: torch.set_num_threads(threads)) as pool:
        other = list(pool.map(lambda _: x.clone() @ w.clone().t(), range(4)))
    return shapes, y.expand(4, *y.shape), torch.stack(other)


@question("product: out= given")
def with_out(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype)
    out = x.new_empty(x.shape[0], w.shape[0])
    torch.mm(x, w.t(), out=out)
    return shapes, x @ w.t(), out


@question("product: linear or mm")
def linear_or_mm(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w, shapes = operands(rng, dtype)
    return shapes, functional.linear(x, w), x @ w.t()


def elementwise(name: str, call: Callable[[Tensor], Tensor]) -> None:
    @question(f"{name}: position, number and address of elements")
    def position(rng: random.Random, dtype: torch.dtype) -> Case:
        count = rng.choice([rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 3000)])
        x = randn(count, dtype=dtype) * rng.choice([1, 4])
        a, b = some(rng, count)
        by = rng.randrange(17)
        return f"{count} elements, {a}:{b} moved by {by}", call(x)[a:b], call(moved(x[a:b], by))


def rowwise(name: str, call: Callable[[Tensor], Tensor]) -> None:
    @question(f"{name}: other rows, address, threads 1 or 2")
    def other_rows(rng: random.Random, dtype: torch.dtype) -> Case:
        rows = rng.choice([rng.randint(2, 9), rng.randint(2, 70), 600])
        x = randn(rows, rng.choice([rng.randint(1, 40), rng.randint(1, 400)]), dtype=dtype)
        a, b = some(rng, rows)
        part = with_threads(1, lambda: call(moved(x[a:b], rng.randrange(17))))
        return f"{tuple(x.shape)} rows {a}:{b}", with_threads(2, lambda: call(x))[a:b], part


elementwise("division", lambda x: x / (x * x + 1))
elementwise("sqrt", lambda x: torch.sqrt(x.abs()))
rowwise("softmax", lambda x: functional.softmax(x, -1))
rowwise("rms_norm", lambda x: functional.rms_norm(x, x.shape[-1:]))
rowwise("layer_norm", lambda x: functional.layer_norm(x, x.shape[-1:]))


@question("AdamW, foreach: some elements of a parameter")
def adamw(rng: random.Random, dtype: torch.dtype) -> Case:
    count = rng.choice([rng.randint(1, 40), rng.randint(1, 1000)])
    p, g = randn(count, dtype=dtype), randn(count, dtype=dtype)
    a, b = some(rng, count)

    def stepped(p: Tensor, g: Tensor) -> Tensor:
        parameter = torch.nn.Parameter(p.clone())
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=True)
        for scale in (1.0, 0.7, -0.3):
            parameter.grad = g * scale
            optimizer.step()
        return parameter.detach()

    return f"{count} elements, {a}:{b}", stepped(p, g)[a:b], stepped(p[a:b], g[a:b].clone())


def embedding_gradient(ids: Tensor, g: Tensor, rows: int) -> Tensor:
    weight = g.new_zeros(rows, g.shape[-1]).requires_grad_()
    functional.embedding(ids, weight).backward(g)
    return weight.grad


@question("embedding gradient: some columns, threads 1 or 2")
def embedding_columns(rng: random.Random, dtype: torch.dtype) -> Case:
    rows, columns = rng.randint(2, 50), rng.randint(2, 70)
    ids = torch.randint(rows, (rng.choice([5, 60, 700]),))
    g = randn(len(ids), columns, dtype=dtype)
    a, b = some(rng, columns)
    whole = with_threads(1, lambda: embedding_gradient(ids, g, rows))[:, a:b]
    part = with_threads(2, lambda: embedding_gradient(ids, g[:, a:b].contiguous(), rows))
    return f"{len(ids)} ids of {rows}, {columns} columns, {a}:{b}", whole, part


@question("embedding gradient: some rows, others masked out")
def embedding_rows(rng: random.Random, dtype: torch.dtype) -> Case:
    rows, columns = rng.randint(2, 50), rng.randint(1, 70)
    ids = torch.randint(rows, (rng.choice([5, 60, 700]),))
    g = randn(len(ids), columns, dtype=dtype)
    a, b = some(rng, rows)
    outside = (ids < a) | (ids >= b)
    local = (ids - a).masked_fill(outside, 0)
    part = embedding_gradient(local, g.masked_fill(outside[:, None], 0), b - a)
    return f"{len(ids)} ids of {rows}, rows {a}:{b}", embedding_gradient(ids, g, rows)[a:b], part


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", QUESTIONS)
def test_bits_do_not_depend_on(text: str, dtype: torch.dtype, one_thread: None) -> None:
    assert first_difference(QUESTIONS[text], dtype, 40) is None


def test_a_difference_of_one_bit_is_found() -> None:
    def odd_sizes(rng: random.Random, dtype: torch.dtype) -> Case:
        size = rng.randint(1, 5)
        x = torch.ones(size, dtype=dtype)
        y = x.clone()
        y.view(torch.int32)[-1] += size % 2
        return str(size), x, y

    assert first_difference(odd_sizes, torch.float32, 50) in ("1", "3", "5")
