"""Candidates that run in their own processes."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Modules of peers that need not be installed.
PEERS = {
    "torchgpipe": "torchgpipe",
    "CTranslate2": "ctranslate2",
}
# llama.cpp is a package of Node's.
NODE_PEERS = Path(".venv/peers/node").resolve()
OPENVINO = Path(".venv/peers/openvino/bin/python").absolute()
VLLM = Path(".venv/peers/vllm/vllm.so").resolve()  # Its kernels between processes.
FILES = {"llama.cpp": NODE_PEERS, "OpenVINO": OPENVINO, "vLLM": VLLM}
Serve = Callable[[Callable[..., float]], None]


class Processes:
    """Processes that wait for a request, take one turn each and send their seconds; the slowest
    counts.

    Args:
        ranks: how many processes.
        worker: called in each as ``worker(rank, port, serve, *arguments)``; ``port`` is a free port
            of this host. It must call ``serve(turn)``.
        arguments: must be picklable.

    Attributes:
        limit: seconds that a turn may take; the first one waits for imports.
    """

    limit = 300.0

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
        self._answers()  # Candidates get ready one after another.

    def __call__(self, *arguments: Any) -> float:
        """Let every process take a turn, with these arguments.

        Raises:
            RuntimeError: one has ended.
            TimeoutError: one does not answer.
        """
        for end in self._ends:
            with contextlib.suppress(ConnectionError):  # Its answer says so.
                end.send(arguments)
        return max(self._answers())

    def _answers(self) -> list[float]:
        found = []
        try:
            for end in self._ends:
                if not end.poll(self.limit):
                    raise TimeoutError(
                        f"a process of {self._name} did not answer in {self.limit} s"
                    )
                found.append(end.recv())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"a process of {self._name} has ended; it has printed why"
            ) from error
        return found

    def close(self) -> None:
        """Kill them: threads of a candidate can keep an interpreter from exiting."""
        for process in self._processes:
            process.kill()
            process.join()


def started(
    workers: Mapping[str, tuple[Any, ...]], names: Sequence[str], *arguments: Any
) -> dict[str, Processes]:
    """The candidates among ``names`` that are installed.

    Args:
        workers: by name: the number of ranks, the worker, and its last arguments.
        arguments: the worker's first ones.
    """
    found = {}
    for name in names:
        package = name.partition(",")[0]
        missing = package in PEERS and importlib.util.find_spec(PEERS[package]) is None
        if missing or package in FILES and not FILES[package].exists():
            print(f"{package} is not installed: left out")
            continue
        ranks, worker, *last = workers[name]
        found[name] = Processes(ranks, worker, *arguments, *last)
    return found


def join(backend: str, rank: int, ranks: int, port: int) -> None:
    """Join the other ranks by ``torch.distributed``, with one thread."""
    import torch.distributed as dist

    import pipekernels.distributed  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )


def repeated(step: Callable[[], Any], count: int, warmup: int = 1) -> Callable[[], float]:
    """A turn: seconds per step of ``count``, after ``warmup`` that do not count."""

    def turn() -> float:
        for _ in range(warmup):
            step()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    return turn


def _main(
    worker: Callable[..., None], rank: int, port: int, end: Any, arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")

    def serve(turn: Callable[..., float]) -> None:
        end.send(0.0)
        while True:
            end.send(turn(*end.recv()))

    worker(rank, port, serve, *arguments)
