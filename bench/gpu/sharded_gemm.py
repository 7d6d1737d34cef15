"""The sharded GEMM against cuBLAS, for layers of Llama models.

Products: forward, the gradients of input and weight of o_proj (k = hidden / degree) and down_proj
(k = inner / degree), by ``ops.sharded_gemm``. Device time; copies of the operands that exceed the
L2 cache are used in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Options, Turns
from bench.timing import sampler
from pipekernels import ops

MODELS = {"Llama-7B": (4096, 11008), "Llama-70B": (8192, 28672)}  # hidden and inner features
TINY_MODELS = {"tiny": (32, 64)}
DEGREES = (8, 1, 4, 2)
TOKENS = (4096, 16, 1, 1024, 256, 16384, 64)
KIND = torch.bfloat16
ALGORITHMS = ("auto", "triton", "cublas")
CACHED = 128 << 20  # bytes of operands that no cache holds
COPIES = 64  # of the operands, at most


class Product(NamedTuple):
    """One product of a layer, ``[m, k] x [k, n]``.

    Attributes:
        way: ``'forward'``, ``'grad_input'`` or ``'grad_weight'``.
        tokens: rows of the layer's input.
        m, n, k: sizes.
    """

    way: str
    tokens: int
    m: int
    n: int
    k: int


def products(
    models: dict[str, tuple[int, int]],
    degrees: tuple[int, ...] = DEGREES,
    all_tokens: tuple[int, ...] = TOKENS,
    least: int = 256,
) -> dict[str, Product]:
    """All products to measure, most important first, as time may be short; gradients from
    ``least`` tokens on."""
    found = {}
    for tokens, degree in itertools.product(all_tokens, degrees):
        for model, (hidden, inner) in models.items():
            for layer, features in (("o_proj", hidden), ("down_proj", inner)):
                part = features // degree
                made = [Product("forward", tokens, tokens, hidden, part)]
                if tokens >= least:
                    made.append(Product("grad_input", tokens, tokens, part, hidden))
                    made.append(Product("grad_weight", tokens, hidden, part, tokens))
                for each in made:
                    case = f"product, {model} {layer} / {degree}, {each.way}, {tokens} tokens"
                    found[case] = each
    return found


PRODUCTS = products(MODELS)
TINY = products(TINY_MODELS, (8,), (3,), 0)
GPU = dict.fromkeys(PRODUCTS, ALGORITHMS)
GPU_QUICK = dict.fromkeys(TINY, ALGORITHMS)
BASE = ("cublas",)
CONDITIONS = {
    "dtype": "bfloat16, random operands",
    "products": "device time, candidates in turn, medians; operands not in the cache",
}


def operands(product: Product, device: torch.device, least: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of ``a`` and ``b`` of ``a @ b.T`` in a layer's layout, of ``least`` bytes in all."""

    def make(rows: int, columns: int, transposed: bool) -> Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        data = torch.randn(shape, device=device, dtype=KIND)
        return data.t() if transposed else data

    m, n, k = product.m, product.n, product.k
    count = min(COPIES, max(1, math.ceil(least / (2 * k * (m + n)))))
    return [
        (make(m, k, product.way == "grad_weight"), make(n, k, product.way != "forward"))
        for _ in range(count)
    ]


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """Times of a product by algorithm, and errors."""
    product = (PRODUCTS | TINY)[case]
    device = options.device
    pairs = operands(product, device, 0 if options.quick else CACHED)
    algorithms = [name for name in names if name != "triton" or device.type == "cuda"]

    def run(algorithm: str) -> Callable[[], float]:
        turn = itertools.cycle(pairs)
        return sampler(lambda: ops.sharded_gemm(*next(turn), algorithm=algorithm), device)

    def more(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
        rate = 2e-12 * product.m * product.n * product.k
        return {name: {"TFLOP/s": rate / medians[name]} for name in algorithms}

    part = "Products of 256 tokens and more" if product.tokens >= 256 else "Products of fewer"
    runners = {name: run(name) for name in algorithms}
    return Turns(runners, 1, 2 if options.quick else 9, more, fields={"part": part})
