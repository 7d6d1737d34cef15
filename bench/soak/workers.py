"""Long-lived processes that form groups and leave them, and may be killed.

They are forked from a server that has imported torch, so a new one starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipekernels import Communicator, PeerError

LIMIT = 300.0  # Seconds for any one task.
TIMEOUT = 120.0  # Seconds of a communicator, unless it shall be short.

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bench.soak.sums", "bench.soak.losses", "bench.soak.mismatches"])


class Worker:
    """A process that runs tasks, one at a time."""

    def __init__(self) -> None:
        self._pipe, other = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def start(self, task: Callable[..., Any], *args: Any) -> None:
        """Begin ``task(*args)`` in the process; a function at the top level of a module."""
        self._pipe.send((task, args))

    def result(self) -> Any:
        """What the task returned; raises what it raised.

        Raises:
            TimeoutError: it has not ended within the limit.
            EOFError: the process has died.
        """
        if not wait([self._pipe], timeout=LIMIT):
            raise TimeoutError(f"a task did not end within {LIMIT} s")
        answer, error = self._pipe.recv()
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kill the process, if it is not dead yet."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def pool(size: int) -> Iterator[list[Worker]]:
    """Workers that are started in advance; those that the list has in the end are ended."""
    workers = [Worker() for _ in range(size)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _serve(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = task(*args), None
        except Exception as error:  # noqa: BLE001
            answer = None, error
        pipe.send(answer)


def collected(results: list[Callable[[], Any]]) -> list[Any]:
    """The results in rank order. Of several errors it raises one that is not a PeerError, if
    possible."""
    found, errors = [], []
    for result in results:
        try:
            found.append(result())
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return found


def run_on_all(workers: list[Worker], task: Callable[..., Any], *args: Any) -> list[Any]:
    """``task(rank, world_size, *args)`` on every worker; the results in rank order."""
    for rank, worker in enumerate(workers):
        worker.start(task, rank, len(workers), *args)
    return collected([worker.result for worker in workers])


def on_processes(workers: list[Worker], store: str, body: Callable[..., Any], *args: Any) -> Any:
    """``body(communicator, *args)`` on a group of the workers, which meet by the new file
    ``store``; the results in rank order."""
    return run_on_all(workers, _as_process, store, body, *args)


def _as_process(
    rank: int, world_size: int, store: str, body: Callable[..., Any], *args: Any
) -> Any:
    with joined(rank, world_size, store, TIMEOUT) as comm:
        return body(comm, *args)


def on_threads(worker: Worker, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    """The same on as many threads of one worker."""
    worker.start(_as_threads, world_size, body, *args)
    return worker.result()


def _as_threads(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    def run(comm: Communicator) -> Any:
        with comm:
            return body(comm, *args)

    with ThreadPoolExecutor(world_size) as threads:
        ranks = [threads.submit(run, c) for c in Communicator.threads(world_size, timeout=TIMEOUT)]
    return collected([rank.result for rank in ranks])


@contextlib.contextmanager
def joined(rank: int, world_size: int, store: str, timeout: float) -> Iterator[Communicator]:
    """A communicator over the processes that name the same new ``store`` file."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        with Communicator.from_process_group(timeout=timeout) as comm:
            yield comm
    finally:
        dist.destroy_process_group()


def traces() -> dict[str, int]:
    """Counts of resources of this process that a communicator could leak."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That of the listing itself.
            targets.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}")))
    found = {name: targets.count(name) for name in set(targets)}
    found["mappings"] = Path("/proc/self/maps").read_text().count("/memfd:pipekernels")
    return found


@contextlib.contextmanager
def no_names_left() -> Iterator[None]:
    """Checks that no new name remains in ``/dev/shm``; waits for other programs to remove theirs.

    Raises:
        AssertionError: there are new names.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = now() + 20
    while left := set(os.listdir("/dev/shm")) - before:
        if now() > deadline:
            raise AssertionError(f"left in /dev/shm, if not by another program: {sorted(left)}")
        time.sleep(0.5)


def now() -> float:
    """Seconds by a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
