"""Threads that run stages at the same time, each with its own share of torch's intra-op threads.

Workers belong to the process: :func:`run_together` borrows one per lane, so a new pipe need not
start threads. They are daemon threads that wait on a queue, so they never delay interpreter exit.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from pipekernels.device.restoring import LOCKS, restoring

Job = Callable[[], None]


class _Loan:
    """The use of some workers by one call."""

    over = False


class _Worker:
    def __init__(self, loan: _Loan) -> None:
        self.loan = loan
        self._jobs: SimpleQueue[tuple[Job, set[_Worker], SimpleQueue[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="pipekernels-lane", daemon=True).start()

    def submit(self, job: Job, ended: set[_Worker], done: SimpleQueue[None]) -> None:
        """Run ``job``, then add this worker to ``ended`` and put a token on ``done``."""
        self._jobs.put((job, ended, done))

    def _run(self) -> None:
        # Not by the starting thread, which a KeyboardInterrupt may stop before it does so.
        _workers.append(self)
        while True:
            job, ended, done = self._jobs.get()
            job()
            ended.add(self)
            done.put(None)
            # A waiting worker must not keep objects of a finished job alive.
            del job, ended, done


_workers: list[_Worker] = []
_workers_lock: Any = threading.RLock()
LOCKS.append(_workers_lock)


def _forget_workers() -> None:
    """Threads do not survive a fork: the child starts with none."""
    _workers.clear()
    _workers_lock._at_fork_reinit()


os.register_at_fork(after_in_child=_forget_workers)


def _borrow(loan: _Loan) -> _Worker:
    """A worker for ``loan``, until ``loan.over``."""
    with _workers_lock:
        for worker in _workers:
            if worker.loan.over:
                worker.loan = loan
                return worker
    return _Worker(loan)


_DENORMAL = float.fromhex("0x1p-1074")


def _flushes_denormals() -> bool:
    """Whether ``torch.set_flush_denormal`` is on, on the calling thread. torch has no getter, but
    then comparisons too treat denormals as zero."""
    return _DENORMAL == 0.0


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Give the calling thread ``count`` intra-op threads while the body runs."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def run_together(
    jobs: Sequence[Job], *, threads: int, interrupted: Callable[[BaseException], None]
) -> None:
    """Run all ``jobs``, which must not raise, at once, the last on the calling thread, each with so
    many intra-op ``threads``; return when every one has ended. ``interrupted`` is called with an
    exception (Ctrl-C) that reaches the caller meanwhile; it must make the others end."""

    def on_worker(job: Job) -> Job:
        variables = contextvars.copy_context()
        begun: list[None] = []

        def run() -> None:
            if begun:
                return
            begun.append(None)
            # Both settings are per thread, and need not be restored on a worker.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if _flushes_denormals() != flush:
                torch.set_flush_denormal(flush)
            variables.run(job)

        return run

    flush = _flushes_denormals()
    done: SimpleQueue[None] = SimpleQueue()
    ended: set[_Worker] = set()
    loan = _Loan()
    work: list[tuple[_Worker, Job]] = []

    def submit_all() -> None:
        for worker, job in work:
            worker.submit(job, ended, done)

    def wait() -> None:
        # Not a count of tokens: an exception may hit this thread after get() has taken one.
        while len(ended) < len(work):
            try:
                done.get()
            except BaseException as error:  # noqa: BLE001 - `interrupted` passes it on
                interrupted(error)
        loan.over = True

    with restoring(wait):
        try:
            work.extend([(_borrow(loan), on_worker(job)) for job in jobs[:-1]])
            submit_all()
            with intra_op_threads(threads):
                jobs[-1]()
        except BaseException as error:  # noqa: BLE001
            interrupted(error)
            submit_all()  # Some may not have been submitted; a job runs only once.
