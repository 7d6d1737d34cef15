"""What row-parallel layers would take on several GPUs, from products measured on one.

A forecast: the products' times are measured ones, those of the all-reduce come from the alpha-beta
model of :mod:`pipekernels.tensor_parallel.overlap`, with a link that is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipekernels.kernels.table import LAYOUTS, Entry, Table
from pipekernels.tensor_parallel.overlap import (
    Link,
    all_reduce_seconds,
    plan,
)

RANKS = (2, 4, 8)
ITEMSIZES = {"float32": 4, "tfloat32": 4}  # Of results; others have 2 bytes.


class Forecast(NamedTuple):
    """A row-parallel layer's forward; times in seconds.

    Attributes:
        tokens, out_features, in_features: of the whole layer.
        ranks: over how many GPUs the input features are sharded.
        single: the whole product on one GPU, measured.
        product: a rank's part of it, measured.
        all_reduce: by the model.
        plain: product, then all-reduce.
        overlapped: both at once where the plan says that it pays, else as ``plain``.
    """

    tokens: int
    out_features: int
    in_features: int
    ranks: int
    single: float
    product: float
    all_reduce: float
    plain: float
    overlapped: float


def forecast(
    measured: Table, link: Link, *, sms: int, kind: str = "bfloat16", ranks: Iterable[int] = RANKS
) -> list[Forecast]:
    """The forwards of all layers whose product was measured whole, and sharded over ``ranks``.

    Args:
        measured: on the GPU that all are to be.
        link: between any two of them, assumed.
        sms: multiprocessors of that GPU.
        kind: what is multiplied.
        ranks: numbers of GPUs.
    """
    found = []
    counts = list(ranks)
    for whole in measured.entries.values():
        shape = whole.shape
        if (shape.kind, shape.layout) != (kind, LAYOUTS[0]):
            continue
        size = shape.m * shape.n * ITEMSIZES.get(kind, 2)
        for count in counts:
            entry = measured.entry(kind, shape.layout, shape.m, shape.n, -(-shape.k // count))
            if entry is None:
                continue
            product, reduce = _best(entry), all_reduce_seconds(size, count, link)
            overlapped = product + reduce
            if entry.config.split_k == 1:
                at_once = plan(
                    shape.m, size, entry.config, entry.seconds, product,
                    ranks=count, sms=sms, link=link,
                )  # fmt: skip
                overlapped = min(overlapped, at_once.seconds)
            found.append(
                Forecast(
                    shape.m, shape.n, shape.k, count, _best(whole), product, reduce,
                    product + reduce, overlapped,
                )
            )  # fmt: skip
    return sorted(found)


def report(rows: list[Forecast], measured: Table, link: Link) -> str:
    """The forecast as a text that says what it is and what it rests on."""
    lines = [
        "FORECAST of row-parallel layers on several GPUs; nobody has measured these.",
        f"  Measured: the products, on one {measured.gpu}, {measured.date}; the faster of Triton and",
        "  the vendor's library.",
        f"  Assumed: each GPU reads {1e-9 / link.beta:.0f} GB/s from its peers, each of its thread",
        f"  blocks {1e-9 / link.block_beta:.0f} GB/s; {1e6 * link.alpha:.1f} us per step of an",
        "  all-reduce; no contention for memory. Times in us.",
        "",
        "tokens    out     in  GPUs   one GPU   product  all-reduce   in turn   at once  speedup",
    ]
    for row in rows:
        times = [1e6 * t for t in row[4:]]
        lines.append(
            f"{row.tokens:>6} {row.out_features:>6} {row.in_features:>6} {row.ranks:>5} "
            f"{times[0]:>9.1f} {times[1]:>9.1f} {times[2]:>11.1f} {times[3]:>9.1f} "
            f"{times[4]:>9.1f} {row.single / row.overlapped:>8.2f}"
        )
    return "\n".join(lines)


def _best(entry: Entry) -> float:
    """What ``auto`` takes in a CUDA graph."""
    return entry.seconds if entry.wins else entry.vendor_seconds
