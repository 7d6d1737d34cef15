"""Candidates that run in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Runners = TypeVar("Runners", bound=Mapping[str, Any])
LIMIT = 120.0  # Seconds that a turn may take.


class Processes:
    """Processes that wait for a request, take one turn each and send their seconds; the slowest
    counts.

    Args:
        ranks: how many processes.
        worker: called in each as ``worker(rank, port, serve, *arguments)``; ``port`` is a free port
            of this host. It must call ``serve(turn)``.
        arguments: must be picklable.
    """

    def __init__(self, ranks: int, worker: Callable[..., None], *arguments: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._name = worker.__name__
        self._ends = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(worker, rank, port, theirs, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __call__(self) -> float:
        """Let every process take a turn.

        Raises:
            RuntimeError: one has ended.
            TimeoutError: one does not answer.
        """
        seconds = []
        try:
            for end in self._ends:
                end.send("turn")
            for end in self._ends:
                if not end.poll(LIMIT):
                    raise TimeoutError(f"a process of {self._name} did not answer in {LIMIT} s")
                seconds.append(end.recv())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"a process of {self._name} has ended; it has printed why"
            ) from error
        return max(seconds)

    def close(self) -> None:
        """Kill them: threads of a candidate can keep an interpreter from exiting."""
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def closing(runners: Runners) -> Iterator[Runners]:
    """Close those candidates that are :class:`Processes` in the end."""
    try:
        yield runners
    finally:
        for runner in runners.values():
            if isinstance(runner, Processes):
                runner.close()


def _main(
    worker: Callable[..., None], rank: int, port: int, end: Any, arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")

    def serve(turn: Callable[[], float]) -> None:
        while end.recv() == "turn":
            end.send(turn())

    worker(rank, port, serve, *arguments)
