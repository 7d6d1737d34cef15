"""How much of the copies between host and GPU is hidden behind compute that takes longer.

Microbatches are copied from or to the host, and the GPU computes on each of them for longer than
its copy takes. ``hidden`` is (copies + compute - both) / copies, with the times of only the copies,
only the compute, and both: 100% if the copies cost nothing, 0% if they do not overlap the compute
at all. ``.to`` is torch's own, on one stream.

* To the GPU: ``ops.p2p_copy`` of each microbatch, from ordinary and from pinned memory.
* To the host: the same copy, begun when a microbatch has been computed and waited for after the
  next one has been issued, as pipelines do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Options, Turns
from bench.timing import call_seconds
from pipekernels import ops
from pipekernels.device.channel import channel

CHUNKS = 16  # The first copy to the GPU, or the last one to the host, has nothing to hide behind.
WIDTH = 4096
ROWS = (256, 2048)  # of a microbatch
LONGER = 1.5  # times as long as its copy, the compute on a microbatch
PRODUCTS = 16  # in a row, of which one's time is taken: launches of later ones cost nothing
HOST = torch.device("cpu")
GPU = {
    f"{way}, {rows} rows": ("copies", "compute", "both", ".to")
    for rows in ROWS
    for way in ("to the GPU", "to the GPU from pinned memory", "to the host")
}
GPU_QUICK = {f"{case.partition(',')[0]}, 4 rows": names for case, names in GPU.items()}
BASE = (".to", "torch")  # The latter in earlier result files.
COLUMNS = ("hidden",)
CONDITIONS = {
    "microbatches": f"{CHUNKS}, of [rows, {WIDTH}] in bfloat16",
    "compute": f"products with [{WIDTH}, {WIDTH}], {LONGER} times as long as the copies or longer",
    "timing": "the caller's time until the device is idle, candidates in turn, medians",
}
Ways = dict[str, Callable[[], Any]]


class Body(nn.Module):
    """``products`` matrix products in sequence."""

    matrix: Tensor

    def __init__(self, width: int, products: int, device: torch.device) -> None:
        super().__init__()
        self.products = products
        matrix = torch.randn(width, width, device=device) / math.sqrt(width)
        self.register_buffer("matrix", matrix.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.products):
            x = x @ self.matrix
        return x


def calibrated(send: Callable[[], Any], x: Tensor, device: torch.device) -> Body:
    """A body that takes :data:`LONGER` times as long on ``x`` as ``send``, or longer."""
    copying = min(call_seconds(send, device) for _ in range(3))
    body = Body(x.shape[1], PRODUCTS, device)
    once = min(call_seconds(lambda: body(x), device) for _ in range(3)) / PRODUCTS
    body.products = max(1, math.ceil(LONGER * copying / once))
    return body


def each(work: Callable[[Tensor], Any], xs: Sequence[Tensor]) -> Callable[[], None]:
    """``work`` on every microbatch."""

    def run() -> None:
        for x in xs:
            work(x)

    return run


def of_operation(way: str, one: Tensor, device: torch.device) -> Ways:
    """``ops.p2p_copy`` in one direction."""
    pinned = "pinned" in way and device.type == "cuda"
    on_host = [one.clone().pin_memory() if pinned else one.clone() for _ in range(CHUNKS)]
    on_device = [x.to(device) for x in on_host]
    to_device = way != "to the host"
    sources, target = (on_host, device) if to_device else (on_device, HOST)
    body = calibrated(lambda: ops.p2p_copy(sources[0], target), on_device[0], device)

    def back(send: Callable[[Tensor], Callable[[], Any]]) -> None:
        """``send`` begins a copy and returns what waits for it."""
        wait: Callable[[], Any] = dict
        for x in sources:
            sent = send(body(x))
            wait()
            wait = sent
        wait()

    ways: Ways = {
        "copies": each(lambda x: ops.p2p_copy(x, target), sources),
        "compute": each(body, on_device),
    }
    if to_device:
        ways["both"] = each(lambda x: body(ops.p2p_copy(x, target)), sources)
        ways[".to"] = each(lambda x: body(x.to(target, non_blocking=True)), sources)
    else:
        way_back = channel(device, target)
        ways["both"] = lambda: back(lambda x: way_back.send([x])[1].wait)
        ways[".to"] = lambda: back(lambda x: functools.partial(x.to, target))
    return ways


def hidden(medians: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The share of the copies that is hidden."""
    apart = medians["copies"] + medians["compute"]
    return {
        name: {"hidden": (apart - medians[name]) / medians["copies"]} for name in ("both", ".to")
    }


def turns(case: str, names: Sequence[str], options: Options) -> Turns:
    """One way, with microbatches of one size."""
    way, _, rows = case.partition(", ")
    width = 64 if options.quick else WIDTH
    one = torch.randn(int(rows.split()[0]), width).to(torch.bfloat16)
    ways = of_operation(way, one, options.device)

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        def turn() -> float:
            with torch.no_grad():
                return call_seconds(run, options.device)

        return turn

    runners = {name: timed(run) for name, run in ways.items()}
    return Turns(runners, 1, 2 if options.quick else 7, hidden)
