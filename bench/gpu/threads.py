"""Ranks that are threads of this process and share one GPU, each with its own stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pipekernels import Communicator, PeerError

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring")
TIMEOUT = 10.0
PERIOD = 4093  # elements, after which contents repeat: prime, so that misplaced blocks show


def contents(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small integers: any order of summation, over up to 16 ranks, gives the same bits in every
    dtype."""
    pattern = torch.randint(1, 17, (PERIOD,), generator=torch.Generator().manual_seed(rank))
    return pattern.to(device, dtype).repeat(-(-count // PERIOD))[:count].clone()


def expected(ranks: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum of all ranks' contents."""
    total = torch.zeros(count, dtype=dtype, device=device)
    for rank in range(ranks):
        total += contents(rank, count, dtype, device)
    return total


class Threads:
    """Ranks on threads of this process, each with its own stream."""

    def __init__(self, ranks: int, device: torch.device, timeout: float = TIMEOUT) -> None:
        self.ranks = ranks
        self.device = device
        self.communicators = Communicator.threads(ranks, timeout=timeout)
        self._pool = ThreadPoolExecutor(ranks)
        self._together = threading.Barrier(ranks, timeout=timeout)
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) if cuda else None for _ in range(ranks)]

    def close(self) -> None:
        """End the threads, and close the communicators."""
        for communicator in self.communicators:
            communicator.close()
        self._pool.shutdown()

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(rank)`` on all ranks at once, in their streams; waits for all ranks and the
        device, and raises their errors."""

        def on_rank(rank: int) -> Any:
            try:
                with torch.cuda.stream(self.streams[rank]):
                    result = body(rank)
                if self.device.type == "cuda":
                    self.communicators[rank].synchronize()
                return result
            except BaseException:
                self._together.abort()
                raise

        futures = [self._pool.submit(on_rank, rank) for rank in range(self.ranks)]
        found = [future.exception() for future in futures]
        # Prefer the original error to errors that it caused on other ranks.
        for consequences in ((threading.BrokenBarrierError, PeerError), ()):
            for error in found:
                if error is not None and not isinstance(error, consequences):
                    raise error
        results = [future.result() for future in futures]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return results

    def symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """A symmetric tensor of zeros of every rank."""
        on = {"device": self.device} if self.device.type == "cuda" else {}
        return self.run(
            lambda rank: self.communicators[rank].empty(shape, dtype=dtype, **on).zero_()
        )

    def meet(self) -> None:
        """Wait on the host until all ranks have called it."""
        self._together.wait()
