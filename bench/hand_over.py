"""Host time of a hand-over: how long the calling thread takes to issue copies of its tensors, by an
edge and by torch's streams and ``copy_``, for :mod:`bench.gpu.p2p_copy`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipekernels.device import streams
from pipekernels.device.edge import Edge

COUNTS = (1, 8)  # tensors of a hand-over
PER_SAMPLE = 20  # hand-overs


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
