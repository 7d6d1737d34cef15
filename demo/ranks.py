"""Processes of one thread each that take turns when asked, and sleep in between.

They are forked from one server, which imports torch and transformers once. They end with the
``with`` block, and when the demo has died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
LIMIT = 120.0  # Seconds for a turn; the first includes imports and preparations.
PATIENCE = 3.0  # Seconds for a process to end by itself.
PRELOADED = ["demo.__main__", "transformers.models.llama.modeling_llama"]

Turn = Callable[..., Any]


@contextmanager
def processes(
    count: int, prepare: Callable[..., Turn], *arguments: Any, backend: str = "gloo"
) -> Iterator[Callable[..., list[Any]]]:
    """Start ``count`` processes, and yield a function that lets each take a turn.

    Args:
        count: of processes, which form a process group.
        prepare: each process calls ``prepare(rank, *arguments)``, which returns its turn.
        arguments: must be picklable; so must the arguments of turns and what turns return.
        backend: of torch.distributed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # A pool would outlive its rank.
    # The server and its children inherit this: Ctrl-C ends the demo, which kills them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    started, connections = [], []
    with TemporaryDirectory() as folder:
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                group = (backend, f"file://{folder}/store", None, count, rank)
                process = context.Process(
                    target=_serve, args=(theirs, group, prepare, arguments), daemon=True
                )
                process.start()
                theirs.close()
                started.append(process)
                connections.append(ours)
            yield partial(_take_turns, connections)
        finally:
            for connection in connections:
                connection.close()  # An idle process returns.
            for process in started:
                process.join(PATIENCE)
                process.kill()
                process.join()


def _take_turns(connections: Sequence[Connection], *arguments: Any) -> list[Any]:
    deadline = time.monotonic() + LIMIT
    answers = []
    try:
        for connection in connections:
            connection.send(arguments)
        for rank, connection in enumerate(connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(
                    f"rank {rank} has not answered within {LIMIT:.0f} s; run the demo on a machine "
                    f"with {RANKS} idle cores"
                )
            answers.append(connection.recv())
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("a rank has ended; it has printed its error") from error
    return answers


def _serve(
    connection: Connection,
    group: tuple[Any, ...],
    prepare: Callable[..., Turn],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # A host name may not resolve.
    dist.init_process_group(*group)
    turn = prepare(dist.get_rank(), *arguments)
    while True:
        try:
            request = connection.recv()
        except EOFError:  # The demo has died.
            return
        connection.send(turn(*request))
