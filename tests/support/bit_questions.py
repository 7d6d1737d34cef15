"""On what the bits of torch's results on a CPU depend, asked with random shapes.

``python -m support.bit_questions [SECONDS]``, in the folder ``tests``, prints a table: per question
how many cases had other bits, and the smallest of them. What libraries do differs between machines,
so run it on yours.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# A question draws one case: what it is, and two results that either have the same bits or do not.
Case = tuple[str, Tensor, Tensor]
Question = Callable[[random.Random, torch.dtype], Case]

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
QUESTIONS: dict[str, Question] = {}


@dataclass
class Answer:
    """How often results differed."""

    cases: int = 0
    differ: int = 0
    example: str = ""
    example_size: int = 0


def question(text: str) -> Callable[[Question], Question]:
    """Register a question: "operation: what is changed"."""

    def register(ask: Question) -> Question:
        QUESTIONS[text] = ask
        return ask

    return register


def ask(text: str, dtype: torch.dtype, cases: int, seconds: float = 60, seed: int = 0) -> Answer:
    """Draw cases of a question until there are enough, or the time is over."""
    rng = random.Random(f"{text} {dtype} {seed}")
    torch.manual_seed(rng.randrange(2**32))
    answer, end = Answer(), time.monotonic() + seconds
    while answer.cases < cases and (answer.cases == 0 or time.monotonic() < end):
        description, a, b = QUESTIONS[text](rng, dtype)
        answer.cases += 1
        if same_bits(a, b):
            continue
        answer.differ += 1
        if not answer.example or len(a.flatten()) < answer.example_size:
            answer.example, answer.example_size = description, len(a.flatten())
    return answer


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


# ---- memory ----


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


# ---- products: x [M, K], W [N, K] ----


def operands(rng: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    large = rng.random() < 0.03
    m = rng.choice([rng.randint(1, 9), rng.randint(1, 64), 256 if large else 8])
    n = rng.choice([rng.randint(1, 20), rng.randint(1, 150), 8 * rng.randint(1, 12)])
    k = rng.choice([rng.randint(1, 40), rng.randint(1, 400), 16 * rng.randint(1, 24)])
    if large:
        n, k = rng.choice([512, 1000, 1376]), rng.choice([512, 1000, 1376, 4096])
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)


def shapes(x: Tensor, w: Tensor) -> str:
    return f"M={x.shape[0]} N={w.shape[0]} K={x.shape[1]}"


def product(ask: Callable[[random.Random, Tensor, Tensor], Case]) -> Question:
    def with_operands(rng: random.Random, dtype: torch.dtype) -> Case:
        x, w = operands(rng, dtype)
        description, a, b = ask(rng, x, w)
        return f"{shapes(x, w)} {description}".strip(), a, b

    return with_operands


@question("product: called again")
@product
def again(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    return "", x @ w.t(), x.clone() @ w.clone().t()


@question("product: addresses moved by 4 to 64 bytes")
@product
def product_address(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    by = [rng.randrange(0, 64 // x.element_size() + 1) for _ in range(3)]
    out = moved(x.new_zeros(x.shape[0], w.shape[0]), by[2])
    torch.mm(moved(x, by[0]), moved(w, by[1]).t(), out=out)
    return f"elements {by}", x @ w.t(), out


@question("product: addresses moved by multiples of 16 bytes")
@product
def product_aligned_address(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    by = [16 * rng.randint(0, 4) // x.element_size() for _ in range(2)]
    return f"elements {by}", x @ w.t(), moved(x, by[0]) @ moved(w, by[1]).t()


@question("product: x and W slabs of multiples of 64 bytes, read in place")
def aligned_slabs(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w = operands(rng, dtype)
    unit = 64 // x.element_size()
    k = max(1, x.shape[1] // unit) * unit
    x, w = (randn(t.shape[0], k, dtype=t.dtype) for t in (x, w))
    slabs = rng.choice([2, 4, 8])
    a, b = (in_place_slab(t, slabs, rng.randrange(slabs)) for t in (x, w))
    return f"{shapes(x, w)}, {slabs} slabs", x @ w.t(), a @ b.t()


@question("product: W is a slab, read in place")
@product
def slab_of_weight(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    slabs = rng.choice([2, 4, 8])
    index = rng.randrange(slabs)
    slab = in_place_slab(w, slabs, index)
    return f"slab {index} of {slabs}", x @ w.t(), x @ slab.t()


@question("product: x is a slab, read in place")
@product
def slab_of_x(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    slabs = rng.choice([2, 4, 8])
    index = rng.randrange(slabs)
    return f"slab {index} of {slabs}", x @ w.t(), in_place_slab(x, slabs, index) @ w.t()


@question("product: on a new thread")
@product
def on_a_new_thread(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    with ThreadPoolExecutor(1) as pool:
        return "", x @ w.t(), pool.submit(torch.mm, x, w.t()).result()


@question("product: several at once, on threads that have called set_num_threads")
@product
def product_beside_others(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    y, threads = x @ w.t(), torch.get_num_threads()
    with ThreadPoolExecutor(2, initializer=lambda: torch.set_num_threads(threads)) as pool:
        other = list(pool.map(lambda _: x.clone() @ w.clone().t(), range(4)))
    return "", y.expand(4, *y.shape), torch.stack(other)


@question("product: threads 1 or 2")
@product
def product_threads(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    def call() -> Tensor:
        return x @ w.t()

    return "", with_threads(1, call), with_threads(2, call)


@question("product: W stored transposed")
@product
def transposed_weight(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    return "", x @ w.t(), x @ w.t().contiguous()


@question("product: x stored transposed")
@product
def transposed_x(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    return "", x @ w.t(), x.t().contiguous().t() @ w.t()


@question("product: out= given")
@product
def product_out(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    out = x.new_empty(x.shape[0], w.shape[0])
    torch.mm(x, w.t(), out=out)
    return "", x @ w.t(), out


@question("product: out= columns of a wider tensor")
@product
def product_strided_out(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    out = in_place_slab(x.new_empty(x.shape[0], w.shape[0]), 2, rng.randrange(2))
    torch.mm(x, w.t(), out=out)
    return "", x @ w.t(), out


@question("product: linear or mm")
@product
def linear_or_mm(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    return "", functional.linear(x, w), x @ w.t()


@question("product: bias in linear, or added")
@product
def bias_added(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    bias = randn(w.shape[0], dtype=x.dtype)
    return "", functional.linear(x, w, bias), functional.linear(x, w) + bias


@question("product: some rows of x")
@product
def some_rows(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    a, b = some(rng, x.shape[0])
    return f"rows {a}:{b}", (x @ w.t())[a:b], x[a:b].clone() @ w.t()


@question("product: some rows of x, in multiples of 4")
def some_aligned_rows(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w = operands(rng, dtype)
    parts = rng.randint(2, 10)
    x = randn(4 * parts, w.shape[1], dtype=w.dtype)
    a, b = (4 * end for end in some(rng, parts))
    return f"{shapes(x, w)} rows {a}:{b}", (x @ w.t())[a:b], x[a:b].clone() @ w.t()


@question("product: some rows of W (columns of the result)")
@product
def some_columns(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    a, b = some(rng, w.shape[0])
    return f"columns {a}:{b}", (x @ w.t())[:, a:b], x @ w[a:b].clone().t()


@question("product: some rows of W, in multiples of 16")
def some_aligned_columns(rng: random.Random, dtype: torch.dtype) -> Case:
    x, w = operands(rng, dtype)
    parts = rng.randint(2, 8)
    w = randn(16 * parts, x.shape[1], dtype=x.dtype)
    a, b = (16 * end for end in some(rng, parts))
    return f"{shapes(x, w)} columns {a}:{b}", (x @ w.t())[:, a:b], x @ w[a:b].clone().t()


@question("product x^T g: some columns of the result")
def weight_gradient(rng: random.Random, dtype: torch.dtype) -> Case:
    g, x = operands(rng, dtype)
    g, x = g.t().contiguous(), x.t().contiguous()  # [tokens, M], [tokens, N]
    a, b = some(rng, x.shape[1])
    description = f"tokens={g.shape[0]} {g.shape[1]}x{x.shape[1]} columns {a}:{b}"
    return description, (g.t() @ x)[:, a:b], g.t() @ x[:, a:b].contiguous()


@question("bmm: other number of batches")
def batches(rng: random.Random, dtype: torch.dtype) -> Case:
    b, m, n, k = rng.randint(2, 12), rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 100)
    x, w = randn(b, m, k, dtype=dtype), randn(b, n, k, dtype=dtype)
    i, j = some(rng, b)
    part = x[i:j].clone() @ w[i:j].clone().transpose(1, 2)
    return f"B={b} M={m} N={n} K={k} batches {i}:{j}", (x @ w.transpose(1, 2))[i:j], part


@question("bmm of one batch, or mm")
@product
def bmm_or_mm(rng: random.Random, x: Tensor, w: Tensor) -> Case:
    b = rng.randint(2, 8)
    y = torch.bmm(x.expand(b, *x.shape).clone(), w.expand(b, *w.shape).clone().transpose(1, 2))
    return f"B={b}", y[-1], x @ w.t()


# ---- elementwise ----

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs()),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "cos": torch.cos,
    "softplus": functional.softplus,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "division": lambda x: x / (x * x + 1),
    "x * y + z": lambda x: torch.addcmul(x, x, x, value=0.3),
}


def elementwise(name: str) -> None:
    call = ELEMENTWISE[name]

    @question(f"{name}: position, number and address of elements")
    def position(rng: random.Random, dtype: torch.dtype) -> Case:
        count = rng.choice([rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 3000)])
        x = randn(count, dtype=dtype) * rng.choice([1, 4])
        a, b = some(rng, count)
        by = rng.randrange(17)
        part = call(moved(x[a:b], by))
        return f"{count} elements, {a}:{b} moved by {by}", call(x)[a:b], part

    @question(f"{name}: columns read in place, threads 1 or 2")
    def strided(rng: random.Random, dtype: torch.dtype) -> Case:
        x = randn(rng.choice([3, 17, 40, 1200]), rng.randint(1, 80), dtype=dtype)
        wide = in_place_slab(x, 2, 1)
        whole = with_threads(1, lambda: call(x))
        return f"{tuple(x.shape)}", whole, with_threads(2, lambda: call(wide))


for name in ELEMENTWISE:
    elementwise(name)


def adamw(p: Tensor, g: Tensor, **options: bool) -> Tensor:
    parameter = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, **options)
    for scale in (1.0, 0.7, -0.3):
        parameter.grad = g * scale
        optimizer.step()
    return parameter.detach()


def adamw_question(option: str) -> None:
    @question(f"AdamW, {option}: some elements of a parameter")
    def some_elements(rng: random.Random, dtype: torch.dtype) -> Case:
        count = rng.choice([rng.randint(1, 40), rng.randint(1, 1000)])
        p, g = randn(count, dtype=dtype), randn(count, dtype=dtype)
        a, b = some(rng, count)
        options = {option: True}
        part = adamw(p[a:b], g[a:b].clone(), **options)
        return f"{count} elements, {a}:{b}", adamw(p, g, **options)[a:b], part


adamw_question("foreach")
adamw_question("fused")

# ---- rows ----

ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: functional.softmax(x, -1),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "sum of a row": lambda x: x.sum(-1),
    "mean of squares": lambda x: x.pow(2).mean(-1),
}


def rowwise(name: str) -> None:
    call = ROWS[name]

    @question(f"{name}: other rows, address, threads 1 or 2")
    def other_rows(rng: random.Random, dtype: torch.dtype) -> Case:
        rows = rng.choice([rng.randint(2, 9), rng.randint(2, 70), 600])
        x = randn(rows, rng.choice([rng.randint(1, 40), rng.randint(1, 400)]), dtype=dtype)
        a, b = some(rng, rows)
        part = with_threads(1, lambda: call(moved(x[a:b], rng.randrange(17))))
        return f"{tuple(x.shape)} rows {a}:{b}", with_threads(2, lambda: call(x))[a:b], part


for name in ROWS:
    rowwise(name)


@question("sum over rows: some columns")
def sum_over_rows(rng: random.Random, dtype: torch.dtype) -> Case:
    x = randn(rng.randint(1, 100), rng.randint(2, 150), dtype=dtype)
    a, b = some(rng, x.shape[1])
    return f"{tuple(x.shape)} columns {a}:{b}", x.sum(0)[a:b], x[:, a:b].contiguous().sum(0)


# ---- attention and embeddings ----


def attention(*qkv: Tensor, **options: bool) -> Iterator[Tensor]:
    """The result and the gradients of its inputs."""
    leaves = [t.clone().requires_grad_() for t in qkv]
    y = functional.scaled_dot_product_attention(*leaves, **options)
    y.backward(torch.ones_like(y) * 0.5)
    yield y.detach()
    yield from (t.grad for t in leaves if t.grad is not None)


def attention_question(text: str, index: int, threads: int) -> None:
    @question(text)
    def heads(rng: random.Random, dtype: torch.dtype) -> Case:
        batch, count = rng.randint(1, 3), rng.choice([2, 4, 8])
        length, width = rng.choice([1, 5, 17, 64, 130]), rng.choice([4, 16, 20, 64])
        past = rng.choice([0, 0, 3, 40])
        causal = not past
        q = randn(batch, count, length, width, dtype=dtype)
        k, v = (randn(batch, count, length + past, width, dtype=dtype) for _ in range(2))
        half = slice(0, count // 2) if rng.random() < 0.5 else slice(count // 2, count)
        whole = with_threads(1, lambda: list(attention(q, k, v, is_causal=causal))[index])
        parts = [t[:, half] for t in (q, k, v)]
        part = with_threads(threads, lambda: list(attention(*parts, is_causal=causal))[index])
        description = f"B={batch} H={count} T={length}+{past} D={width} heads {half.start}:"
        return description, whole[:, half], part


attention_question("attention: half of the heads", 0, 1)
attention_question("attention: half of the heads, threads 1 or 2", 0, 2)
attention_question("attention, gradient of q: half of the heads, threads 1 or 2", 1, 2)
attention_question("attention, gradient of k: half of the heads, threads 1 or 2", 2, 2)


def embedding_gradient(ids: Tensor, g: Tensor, rows: int) -> Tensor:
    weight = g.new_zeros(rows, g.shape[-1]).requires_grad_()
    functional.embedding(ids, weight).backward(g)
    assert weight.grad is not None
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


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)  # But where a question is about threads.
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300
    each = seconds / len(QUESTIONS) / len(DTYPES)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| operation: what is changed | dtype | cases | other bits | an example |")
    print("| :-- | :-- | --: | --: | :-- |")
    for text in QUESTIONS:
        for dtype in DTYPES:
            answer = ask(text, dtype, 200, each)
            name = str(dtype).removeprefix("torch.")
            print(
                f"| {text} | {name} | {answer.cases} | {answer.differ} | {answer.example} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
