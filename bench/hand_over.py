"""Host time of a hand-over: how long the calling thread takes to issue copies of its tensors.

Compared are an edge and :class:`ByTorch`, the same copies by torch's streams and ``copy_``, as
edges issued them before the extension did. ``bench.gpu.p2p_copy`` measures both on a GPU.

Here is measured what needs none: the Python of both, and torch's own below it. Tensors are on the
CPU, and what would call the driver returns at once: streams and events of ``torch.cuda``, and the
compiled half of the edge. So neither the runtime's calls are in it, of which
``csrc/tests/p2p_copy_test times`` counts those of both, nor the extension's reading of the tensors.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import harness
from bench.harness import Measured
from bench.report.tables import speed_ups
from pipekernels.device import p2p, streams
from pipekernels.device.edge import Edge

COUNTS = (1, 8)  # tensors of a hand-over
PER_SAMPLE = 20  # hand-overs
CPU = torch.device("cpu")
CASES = {f"{count} tensor{'s' * (count > 1)}": count for count in COUNTS}
CANDIDATES = dict.fromkeys(CASES, ("torch", "edge"))
QUICK = CANDIDATES
BASE = "torch"
CONDITIONS = {"timing": f"without a driver, samples of {PER_SAMPLE}, both in turn, medians"}


class ByTorch:
    """Copies by streams of torch's, without an edge's account of who holds which memory."""

    def __init__(self, source: torch.device, target: torch.device, place: torch.device) -> None:
        self.source, self.target, self.place = source, target, place
        self.leaving, self.arriving = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self.done = streams.HOST

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        origin = streams.current(self.source)
        self.leaving.wait_event(origin.record_event())
        origin.wait_event(self.done)
        copies = []
        for tensor in tensors:
            tensor = tensor.detach()
            with streams.using(self.arriving):
                copy = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.place
                )
            with streams.using(self.leaving), streams.using(self.arriving):
                copy.copy_(tensor, non_blocking=True)
            copies.append(copy)
        self.done = self.arriving.record_event()
        streams.current(self.target).wait_event(self.done)
        return copies


def by_edge(edge: Edge) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The same by an edge."""

    def hand_over(tensors: Sequence[Tensor]) -> list[Tensor]:
        copies, arrival = edge.send(tensors)
        arrival.wait()
        return copies

    return hand_over


def seconds(
    hand_over: Callable[[Sequence[Tensor]], Any],
    tensors: Sequence[Tensor],
    wait: Callable[[], None],
) -> float:
    """Of the calling thread, per hand-over; ``wait`` waits for the devices."""
    wait()
    begin = time.perf_counter()
    for _ in range(PER_SAMPLE):
        hand_over(tensors)
    result = (time.perf_counter() - begin) / PER_SAMPLE
    wait()
    return result


class _Stream:
    """A stream whose functions return at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> Any:
        return streams.HOST

    def wait_event(self, event: Any) -> None:
        pass


class _Native:
    """A compiled half, and a ticket, whose functions return at once."""

    leaving = arriving = 0

    def send(self, *args: Any) -> bool:
        return False

    def mark(self, *args: Any) -> bool:
        return True

    def wait(self, *args: Any) -> bool:
        return True


@contextlib.contextmanager
def _without_driver() -> Iterator[None]:
    """What calls the driver returns at once; new memory is the CPU's."""
    current: dict[Any, Any] = {
        device: _Stream(device) for device in (torch.device("cuda", 0), torch.device("cuda", 1))
    }
    current[None] = current[torch.device("cuda", 0)]
    allocate = streams.empty_like
    fakes = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "_get_device_index", lambda device, optional=False: 0),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "current_stream", current.__getitem__),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "Stream", _Stream),
        (streams, "external", lambda device, handle: _Stream(device)),
        (streams, "current_handle", lambda device: 0),
        (streams, "empty_like", lambda tensors, device, stream: allocate(tensors, CPU, stream)),
        (p2p, "new_edge", lambda *args: _Native()),
        (p2p, "new_ticket", _Native),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(mock.patch.object(owner, name, fake))
        yield


def measure(plan: Mapping[str, Sequence[str]], quick: bool) -> Iterator[Measured]:
    """Both ways in turn, without a driver."""
    source, target = torch.device("cuda", 0), torch.device("cuda", 1)
    for case in plan:
        with _without_driver():
            ways = {"torch": ByTorch(source, target, CPU), "edge": by_edge(Edge(source, target))}
            tensors = [torch.ones(1) for _ in range(CASES[case])]
            turns = {
                name: functools.partial(seconds, way, tensors, lambda: None)
                for name, way in ways.items()
            }
            samples = harness.alternate(turns, warmup=2, rounds=20 if quick else 100)
        yield harness.compared(case, samples, BASE)


def table(rows: list[dict[str, Any]]) -> str:
    """A row per way and number of tensors."""
    return speed_ups(rows, BASE)
