"""Two ways to run one program: on the calling thread alone, or with a thread per lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

from pipekernels.device.restoring import restore_despite_interrupt
from pipekernels.pipeline.engine import lanes
from pipekernels.pipeline.schedule.program import Action, Program

Compute = Callable[[Action, Any], Any]
"""Runs an action, given the result of the same action on the stage ``Program.before``, or None if
there is no such stage; returns its own result."""

_STOP = object()


def run_inline(program: Program, compute: Compute, order: Sequence[Action] | None = None) -> None:
    """Run all actions one after another on the calling thread, in ``order``. Default:
    ``program.order``."""
    results: dict[tuple[int, int, bool], Any] = {}  # by receiver: stage, micro-batch, direction
    for action in program.order if order is None else order:
        key = (action.stage, action.micro_batch, action.goes_up)
        result = compute(action, results.pop(key) if program.before(action) is not None else None)
        receiver = program.after(action)
        if receiver is not None:
            results[receiver, action.micro_batch, action.goes_up] = result


def run_on_lanes(
    program: Program,
    compute: Compute,
    *,
    threads: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run each lane of the program on a thread of its own, the last one on the calling thread.

    There is one queue per receiving stage and direction. In every schedule the receiving stage
    handles micro-batches in the order of the sending one. When an action raises, the other lanes
    stop at their next action, and the first exception is raised here, with its traceback.

    Args:
        program: the actions.
        compute: called on the lanes.
        threads: intra-op threads of each lane.
        around: returns a context that a lane enters for the whole program.
    """
    inboxes: dict[tuple[int, bool], SimpleQueue[Any]] = {
        (stage, goes_up): SimpleQueue()
        for stage in range(program.stages)
        for goes_up in (False, True)
    }
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        for inbox in inboxes.values():
            inbox.put(_STOP)

    @restore_despite_interrupt
    def run_actions(actions: Sequence[Action]) -> None:
        with around():
            for action in actions:
                value = None
                if program.before(action) is not None:
                    value = inboxes[action.stage, action.goes_up].get()
                if failures:
                    return
                result = compute(action, value)
                receiver = program.after(action)
                if receiver is not None:
                    inboxes[receiver, action.goes_up].put(result)

    def run_lane(actions: Sequence[Action]) -> None:
        try:
            run_actions(actions)
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            fail(error)

    jobs = [partial(run_lane, lane) for lane in program.lanes]
    try:
        lanes.run_together(jobs, threads=threads, interrupted=fail)
        if failures:
            raise failures[0]
    finally:
        # The exception's frames refer to this list: break the cycle, which keeps the pass's memory.
        failures.clear()
