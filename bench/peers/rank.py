"""``python -m bench.peers.rank SYSTEM FOLDER RANK RANKS``: a rank that waits for requests.

It connects to the socket in ``FOLDER`` and sleeps until it receives a request. So ranks of all
systems can exist at the same time without disturbing each other. Peers have other versions of
NumPy, so this file needs nothing but it.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.systems import SYSTEMS, Candidate, System, elements

LIMIT = 120.0  # Seconds that a request may take; then the rank ends itself.
PERIOD = 1021  # Of the tensors' contents: prime, so that misplaced blocks show.


class Start:
    """Lets all ranks of a group begin at the same time, by spinning: sleepers wake one by one.

    Args:
        path: a file of zeros that the ranks share.
        rank: this rank.
        ranks: their number; each should have a core.
    """

    CELL = 16  # Words: each rank writes to its own cache line.
    LEAD = 5_000  # Nanoseconds from the last arrival to the start.

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), self.bytes(ranks))).cast("q")
        self._mine = rank * self.CELL
        self._peers = [peer * self.CELL for peer in range(ranks) if peer != rank]
        self._begin = ranks * self.CELL
        self._leads = rank == 0
        self._round = self._last = 0

    @classmethod
    def bytes(cls, ranks: int) -> int:
        """Size of the file: the count of arrivals of each rank, and the time of the next start."""
        return (ranks + 1) * cls.CELL * 8

    def together(self) -> int:
        """Return at the same time on all ranks: that time, in nanoseconds of ``perf_counter``."""
        words = self._words
        self._round += 1
        words[self._mine] = self._round
        if self._leads:
            for peer in self._peers:
                while words[peer] < self._round:
                    pass
            words[self._begin] = time.perf_counter_ns() + self.LEAD
        while words[self._begin] == self._last:
            pass
        self._last = begin = words[self._begin]
        while time.perf_counter_ns() < begin:
            pass
        return begin


def contents(rank: int, count: int, dtype: str) -> np.ndarray:
    """A rank's tensor: small integers, so that any order of summation gives the same bits."""
    return _encode(_pattern(rank), count, dtype)


def expected(ranks: int, count: int, dtype: str) -> np.ndarray:
    """The sum of all ranks' tensors; up to 256, what bfloat16 has bits for."""
    return _encode(np.sum([_pattern(rank) for rank in range(ranks)], 0), count, dtype)


def _pattern(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(1, 17, PERIOD).astype(np.float32)


def _encode(pattern: np.ndarray, count: int, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        pattern = (pattern.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(pattern, count)


class Rank:
    """The requests that a rank answers."""

    def __init__(self, system: System, ranks: int, start: Start) -> None:
        self._system, self._ranks, self._start = system, ranks, start
        self._candidates: dict[str, Candidate] = {}
        self._source = self._expected = np.empty(0)

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self._system.rank,
            "pid": os.getpid(),
            "version": self._system.version,
            "cores": len(os.sched_getaffinity(0)),
        }

    def prepare(self, size: int, dtype: str) -> list[str]:
        """Make the buffers of ``size`` bytes; returns the names of the candidates."""
        self._candidates = {}  # Frees the last ones.
        count = elements(size, dtype)
        self._candidates = self._system.candidates(count, dtype)
        self._source = contents(self._system.rank, count, dtype)
        self._expected = expected(self._ranks, count, dtype)
        return list(self._candidates)

    def check(self, candidate: str) -> int:
        """The number of wrong elements after one call."""
        buffer, call, reduces = self._candidates[candidate]
        np.copyto(buffer, self._source)
        call()
        return int(np.count_nonzero(buffer != self._expected)) if reduces else 0

    def measure(self, candidate: str, warmup: int, calls: int) -> list[int]:
        """Nanoseconds to the end of each call from a common start; tensors are rewritten before."""
        buffer, call, _ = self._candidates[candidate]
        source, clock = self._source, time.perf_counter_ns
        times = []
        for _ in range(warmup + calls):
            np.copyto(buffer, source)
            begin = self._start.together()
            call()
            times.append(clock() - begin)
        return times[warmup:]


def main() -> None:
    """Serve requests until the connection is closed."""
    name, folder, rank, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(folder / "socket"))
    connection = Connection(client.detach())
    try:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        system = SYSTEMS[name](rank, ranks, folder)
        serving = Rank(system, ranks, Start(folder / "start", system.rank, ranks))
        method: str = "describe"
        arguments: dict[str, Any] = {}
        while True:
            connection.send((getattr(serving, method)(**arguments), None))
            faulthandler.cancel_dump_traceback_later()
            try:
                method, arguments = connection.recv()
            except (EOFError, ConnectionError):
                break
            faulthandler.dump_traceback_later(LIMIT, exit=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        system.close()
    except Exception:  # noqa: BLE001 (the coordinator tells)
        connection.send((None, traceback.format_exc()))
        os._exit(1)


if __name__ == "__main__":
    main()
