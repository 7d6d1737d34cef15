"""How much of the copies between host and GPU is hidden behind compute that takes longer.

Micro-batches are copied from or to the host, and the GPU computes on each of them for longer than
its copy takes. ``hidden`` is (copies + compute - both) / copies, with the times of only the copies,
only the compute, and both: 100% if the copies cost nothing, 0% if they do not overlap the compute
at all. ``.to`` is torch's own, on one stream.

* To the GPU: ``ops.p2p_copy`` of each micro-batch, from ordinary and from pinned memory.
* To the host: the same copy, begun when a micro-batch has been computed and waited for after the
  next one has been issued, as pipelines do.
* ``Pipe``: a first stage on the CPU that does nothing, a second one on the GPU.
* Device map: a CPU model with a module on the GPU, ``parallelize_pipeline(..., chunks=...)``.

Then the calling thread's time to issue the copies of one and of eight small tensors, by an edge and
by a loop of torch's ``copy_`` (``bench/hand_over.py``): between two GPUs, or to the only one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench import hand_over, harness
from bench.gpu.timing import Row, attempt, call_seconds, errors, synchronize
from bench.report.tables import duration, markdown
from pipekernels import Pipe, ops, parallelize_pipeline, unparallelize_pipeline
from pipekernels.device.edge import edge

CHUNKS = 16  # The first copy to the GPU, or the last one to the host, has nothing to hide behind.
WIDTH = 4096
ROWS = (256, 2048)  # of a micro-batch
LONGER = 1.5  # times as long as its copy, the compute on a micro-batch
PRODUCTS = 16  # in a row, of which one's time is taken: launches of later ones cost nothing
CONDITIONS = {
    "micro-batches": f"{CHUNKS}, of [rows, {WIDTH}] in bfloat16",
    "compute": f"products with [{WIDTH}, {WIDTH}], {LONGER} times as long as the copies or longer",
    "timing": "the caller's time until the device is idle, candidates in turn, medians",
}


class Body(nn.Module):
    """``products`` matrix products in sequence."""

    def __init__(self, width: int, products: int, device: torch.device) -> None:
        super().__init__()
        self.products = products
        matrix = torch.randn(width, width, device=device) / math.sqrt(width)
        self.register_buffer("matrix", matrix.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.products):
            x = x @ self.matrix
        return x


def calibrated(send: Callable[[], Any], x: Tensor, width: int, device: torch.device) -> Body:
    """A body that takes :data:`LONGER` times as long on ``x`` as ``send``, or longer."""
    copying = min(call_seconds(send, device) for _ in range(3))
    body = Body(width, PRODUCTS, device)
    once = min(call_seconds(lambda: body(x), device) for _ in range(3)) / PRODUCTS
    body.products = max(1, math.ceil(LONGER * copying / once))
    return body


def of_operation(direction: str, memory: str, rows: int, args: argparse.Namespace) -> Row:
    """Measure ``ops.p2p_copy`` in one direction."""
    device, width = args.device, 64 if args.quick else WIDTH
    pinned = memory == "pinned" and device.type == "cuda"
    one = torch.randn(rows, width).to(torch.bfloat16)  # One for all: random numbers are slow.
    on_host = [one.clone().pin_memory() if pinned else one.clone() for _ in range(CHUNKS)]
    on_device = [x.to(device) for x in on_host]
    host = torch.device("cpu")
    to_device = direction == "to the GPU"
    sources, target = (on_host, device) if to_device else (on_device, host)
    body = calibrated(lambda: ops.p2p_copy(sources[0], target), on_device[0], width, device)

    def copies() -> None:
        for x in sources:
            ops.p2p_copy(x, target)

    def compute() -> None:
        for x in on_device:
            body(x)

    def there(send: Callable[[Tensor], Tensor]) -> None:
        for x in sources:
            body(send(x))

    def back(send: Callable[[Tensor], Callable[[], Any]]) -> None:
        """``send`` begins a copy and returns what waits for it."""
        wait: Callable[[], Any] | None = None
        for x in sources:
            sent = send(body(x))
            if wait is not None:
                wait()
            wait = sent
        if wait is not None:
            wait()

    ways: dict[str, Callable[[], Any]] = {"copies": copies, "compute": compute}
    if to_device:
        ways["both"] = lambda: there(lambda x: ops.p2p_copy(x, target))
        ways[".to"] = lambda: there(lambda x: x.to(target, non_blocking=True))
    else:
        way_back = edge(device, target)
        ways["both"] = lambda: back(lambda x: way_back.send([x])[1].wait)
        ways[".to"] = lambda: back(lambda x: functools.partial(x.to, target))
    return _hidden(ways, args)


def of_model(way: str, rows: int, args: argparse.Namespace) -> Row:
    """Measure a model whose first module is on the CPU and whose second one is on the GPU."""
    device, width = args.device, 64 if args.quick else WIDTH
    x = torch.randn(rows, width).to(torch.bfloat16).repeat(CHUNKS, 1)
    micro_batches = list(x.to(device).chunk(CHUNKS))
    body = calibrated(lambda: ops.p2p_copy(x[:rows], device), micro_batches[0], width, device)
    alone = copy.copy(body)
    model = nn.Sequential(nn.Identity(), body)
    model_on_gpu: nn.Module = model
    if way == "Pipe":
        model_on_gpu = Pipe(
            model, [1, 1], devices=["cpu", device], chunks=CHUNKS, checkpoint="never"
        )
    else:
        parallelize_pipeline(model, {"": ("cpu", device), "1": device}, chunks=CHUNKS)

    def copies() -> None:
        for part in x.chunk(CHUNKS):
            ops.p2p_copy(part, device)

    def compute() -> None:
        for part in micro_batches:
            alone(part)

    try:
        with torch.no_grad():
            return _hidden(
                {"copies": copies, "compute": compute, "both": lambda: model_on_gpu(x)}, args
            )
    finally:
        if way != "Pipe":
            unparallelize_pipeline(model)


def of_host(count: int, args: argparse.Namespace) -> Row:
    """Measure the host time of a hand-over of ``count`` tensors."""
    target, source = args.device, torch.device("cpu")
    if target.type == "cuda" and torch.cuda.device_count() > 1:
        source = torch.device("cuda", (target.index or 0) ^ 1)
    tensors = [torch.ones(1024, device=source) for _ in range(count)]
    if source.type != target.type:
        tensors = [tensor.pin_memory() for tensor in tensors]
    by_torch: Callable[[Sequence[Tensor]], list[Tensor]]
    by_torch = lambda tensors: [tensor.to(target, non_blocking=True) for tensor in tensors]
    if source.type == "cuda":
        by_torch = hand_over.ByTorch(source, target, target)
    ways = {"edge": hand_over.by_edge(edge(source, target)), "torch": by_torch}
    runners = {
        name: functools.partial(hand_over.seconds, way, tensors, lambda: synchronize(target))
        for name, way in ways.items()
    }
    samples = harness.alternate(runners, warmup=1, rounds=2 if args.quick else 51)
    return {"ways": {name: harness.summary(found) for name, found in samples.items()}}


def _hidden(ways: dict[str, Callable[[], Any]], args: argparse.Namespace) -> Row:
    runners = {
        name: functools.partial(call_seconds, way, args.device) for name, way in ways.items()
    }
    samples = harness.alternate(runners, warmup=1, rounds=2 if args.quick else 7)
    found = {name: harness.summary(seconds) for name, seconds in samples.items()}
    medians = {name: figures["median"] for name, figures in found.items()}
    apart = medians["copies"] + medians["compute"]
    return {
        "ways": found,
        "hidden": {
            name: (apart - medians[name]) / medians["copies"]
            for name in ("both", ".to")
            if name in medians
        },
    }


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row per way and size."""
    for rows in (4,) if args.quick else ROWS:
        for direction in ("to the GPU", "to the host"):
            for memory in ("ordinary", "pinned") if direction == "to the GPU" else ("ordinary",):
                yield from attempt(
                    {"case": f"p2p_copy {direction}", "memory": memory, "rows": rows},
                    functools.partial(of_operation, direction, memory, rows, args),
                )
        for way in ("Pipe", "device map"):
            yield from attempt(
                {"case": way, "memory": "ordinary", "rows": rows},
                functools.partial(of_model, way, rows, args),
            )
    for count in hand_over.COUNTS:
        yield from attempt(
            {"case": "host time", "tensors": count}, functools.partial(of_host, count, args)
        )


def table(rows: list[Row]) -> str:
    """A row per case; then the host times."""
    host = [row for row in rows if row["case"] == "host time" and "error" not in row]
    header = ["case", "host memory", "rows", "copies", "compute", "both", "hidden", "hidden by .to"]
    hidden = markdown(
        header,
        [
            [
                *(row["case"], row["memory"], str(row["rows"])),
                *(duration(row["ways"][way]["median"]) for way in ("copies", "compute", "both")),
                *(
                    f"{row['hidden'][way]:.0%}" if way in row["hidden"] else ""
                    for way in ("both", ".to")
                ),
            ]
            for row in rows
            if "hidden" in row
        ],
    )
    times = markdown(
        ["tensors", "host time of an edge", "of torch", "ratio"],
        [
            [
                str(row["tensors"]),
                *(duration(row["ways"][way]["median"]) for way in ("edge", "torch")),
                f"{row['ways']['edge']['median'] / row['ways']['torch']['median']:.2f}",
            ]
            for row in host
        ],
    )
    tables = f"{hidden}\n\n{times}" if host else hidden
    return tables + errors(rows, "case", "memory", "rows", "tensors")
