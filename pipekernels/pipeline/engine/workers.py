"""Runs the lanes of a program at the same time: each on a worker, a thread with its own share of
torch's intra-op threads."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from pipekernels.pipeline.context import CallerContext
from pipekernels.pipeline.schedule import Action, Program

_executor: ThreadPoolExecutor


def _start() -> None:
    # One per process: a new pipe need not start threads. No lane may wait for a free thread, as
    # workers wait for each other's results: so no limit is reached.
    global _executor
    _executor = ThreadPoolExecutor(max_workers=1 << 16, thread_name_prefix="pipekernels-worker")


_start()
os.register_at_fork(after_in_child=_start)  # Threads do not survive a fork.

_DENORMAL = float.fromhex("0x1p-1074")


def _flushes_denormals() -> bool:
    """Whether ``torch.set_flush_denormal`` is on, on the calling thread."""
    return _DENORMAL == 0.0  # torch has no getter, but this comparison obeys the same mode.


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


def add_note(error: Exception, action: Action, stage: str) -> None:
    """Say in a note (PEP 678) that ``action``, of ``stage``, has raised ``error``."""
    what = "forward" if action.type == "F" else "backward"
    m = "several microbatches" if action.micro_batch < 0 else f"microbatch {action.micro_batch}"
    note = f"raised in the {what} of {stage}, {m} of a pipe"
    # BaseException.add_note() needs Python 3.11. A layer may raise one object repeatedly.
    notes = vars(error).setdefault("__notes__", [])
    notes += {note}.difference(notes)


def run_program(program: Program, compute: Callable[[Action, Any], Any], threads: int) -> None:
    """Run each lane of ``program`` on its own thread, the last one on the calling thread, with so
    many intra-op ``threads``; ``compute`` is as for ``ExecutionPlan.run``. When an action raises,
    the other workers stop at their next action, and the first exception is raised here, with its
    traceback. So is one (Ctrl-C) that reaches the calling thread meanwhile."""
    # Each action that takes another one's result waits for it at a queue of its own. So a worker
    # runs its lane in order, however late the others are.
    inboxes: dict[Action, SimpleQueue[Any]] = {
        receiver: SimpleQueue() for receiver in program.receivers.values()
    }
    failures: list[BaseException] = []
    context, flush = CallerContext(), _flushes_denormals()

    def fail(error: BaseException) -> None:
        failures.append(error)
        for inbox in inboxes.values():
            inbox.put(None)  # Wakes the worker that waits.

    def run_lane(actions: Sequence[Action]) -> None:
        action: Action | None = None
        try:
            # Both settings are per thread. Nothing restores them: the next lane sets its own.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if _flushes_denormals() != flush:
                torch.set_flush_denormal(flush)
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
        except BaseException as error:  # noqa: BLE001 - raised again on the calling thread
            if action is not None and isinstance(error, Exception):
                add_note(error, action, f"stage {action.stage}")
            fail(error)

    # The last lane, which returns the outputs or computes the loss, runs on the calling thread.
    futures: list[Future[None]] = []
    try:
        for lane in program.lanes[:-1]:
            futures.append(_executor.submit(contextvars.copy_context().run, run_lane, lane))
        with intra_op_threads(threads):
            run_lane(program.lanes[-1])
    except BaseException as error:  # noqa: BLE001
        fail(error)
    # Wait for every worker, through interrupts too: until then they use the mini-batch.
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:  # noqa: BLE001
            fail(error)
    try:
        if failures:
            raise failures[0]
    finally:
        # Break the cycle with the exception's frames, which keeps the mini-batch's memory.
        failures.clear()
