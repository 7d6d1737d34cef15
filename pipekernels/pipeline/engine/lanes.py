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
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from pipekernels.pipeline.schedule.program import Action, Program
from pipekernels.pipeline.stage.context import CallerContext

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
        while True:
            job, ended, done = self._jobs.get()
            job()
            ended.add(self)
            done.put(None)
            # A waiting worker must not keep objects of a finished job alive.
            del job, ended, done


_workers: list[_Worker] = []
_workers_lock: Any = threading.RLock()


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
        worker = _Worker(loan)
        _workers.append(worker)
    return worker


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

        def run() -> None:
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
    submitted = 0
    try:
        for job in jobs[:-1]:
            _borrow(loan).submit(on_worker(job), ended, done)
            submitted += 1
        with intra_op_threads(threads):
            jobs[-1]()
    except BaseException as error:  # noqa: BLE001 - `interrupted` passes it on
        interrupted(error)
    # Not a count of tokens: Ctrl-C may hit this thread after get() has taken one.
    while len(ended) < submitted:
        try:
            done.get()
        except BaseException as error:  # noqa: BLE001
            interrupted(error)
    loan.over = True


def run_program(program: Program, compute: Callable[[Action, Any], Any], threads: int) -> None:
    """Run each lane of ``program`` on its own thread, the last one on the calling thread, with so
    many intra-op ``threads``; ``compute`` is as for ``Plan.run``. When an action raises, the other
    lanes stop at their next action, and the first exception is raised here, with its traceback."""
    inboxes: dict[Action, SimpleQueue[Any]] = {
        receiver: SimpleQueue() for receiver in program.receivers.values()
    }
    failures: list[BaseException] = []
    context = CallerContext()

    def fail(error: BaseException) -> None:
        failures.append(error)
        for inbox in inboxes.values():
            inbox.put(None)  # Wakes the lane that waits.

    def run_lane(actions: Sequence[Action]) -> None:
        try:
            with context.applied():
                for action in actions:
                    inbox = inboxes.get(action)
                    value = None if inbox is None else inbox.get()
                    if failures:
                        return
                    result = compute(action, value)
                    receiver = program.receivers.get(action)
                    if receiver is not None:
                        inboxes[receiver].put(result)
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            fail(error)

    try:
        jobs = [partial(run_lane, lane) for lane in program.lanes]
        run_together(jobs, threads=threads, interrupted=fail)
        if failures:
            raise failures[0]
    finally:
        # Break the cycle with the exception's frames, which keeps the mini-batch's memory.
        failures.clear()
