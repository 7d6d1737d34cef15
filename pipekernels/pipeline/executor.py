"""Two ways to run one program: on the calling thread alone, or with one lane per stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

from pipekernels.pipeline import lanes
from pipekernels.pipeline.schedule import Action, Kind, Program

Compute = Callable[[Action, Any], Any]
"""Does an action, given the result of the same on the stage before (None on the first), and returns
its own."""

KINDS: tuple[Kind, ...] = ("F", "B")
_STOP = object()


def run_inline(program: Program, compute: Compute) -> None:
    """Run all actions one after another on the calling thread."""
    results: dict[tuple[Kind, int], Any] = {}  # of each micro-batch's furthest forward and backward
    first = {kind: program.first(kind) for kind in KINDS}
    last = {kind: program.last(kind) for kind in KINDS}
    for action in program.order:
        kind, stage, m = action
        result = compute(action, None if stage == first[kind] else results.pop((kind, m)))
        if stage != last[kind]:
            results[kind, m] = result


def run_on_lanes(
    program: Program,
    compute: Compute,
    *,
    threads: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run each stage's actions on a lane of its own; the last stage's lane is the calling thread.

    Results travel through one queue per (kind, receiving stage). Its order is the sender's order of
    actions, which every schedule keeps on both sides. When an action raises, the other lanes stop
    at their next action, and the first exception is raised here, with its traceback.

    Args:
        program: per stage, its actions in order.
        compute: called on the lanes.
        threads: intra-op threads of each lane.
        around: makes the context that a lane enters for the whole program.
    """
    inboxes: dict[tuple[Kind, int], SimpleQueue[Any]] = {
        (kind, stage): SimpleQueue() for kind in KINDS for stage in range(program.stages)
    }
    failures: list[BaseException] = []
    failing = threading.Lock()

    def fail(error: BaseException) -> None:
        with failing:
            failures.append(error)
        for inbox in inboxes.values():
            inbox.put(_STOP)

    def run_lane(stage: int) -> None:
        try:
            with around():
                for action in program.lanes[stage]:
                    kind = action.kind
                    value = None
                    if stage != program.first(kind):
                        value = inboxes[kind, stage].get()
                    if failures or value is _STOP:
                        return
                    result = compute(action, value)
                    if stage != program.last(kind):
                        inboxes[kind, stage + 1 if kind == "F" else stage - 1].put(result)
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            fail(error)

    def lane(stage: int) -> lanes.Job:
        return lambda: run_lane(stage)

    lanes.run_together([lane(s) for s in range(program.stages)], threads=threads, interrupted=fail)
    if failures:
        try:
            raise failures[0]
        finally:
            # The exception's frames hold this list: break the cycle, the pass's memory hangs on it.
            failures.clear()
