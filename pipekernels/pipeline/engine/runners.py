"""Runs the actions of one mini-batch: on the calling thread, or with a thread per lane.

Results do not depend on the runner: all run the same operations on the same number of intra-op
threads with the same random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from pipekernels.pipeline.engine import lanes
from pipekernels.pipeline.engine.auto import FIRST, Auto, Signature
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule.program import Action, Program, Schedule, order_of_issue
from pipekernels.pipeline.stage.context import CallerContext, needs_this_thread
from pipekernels.pipeline.stage.random_state import (
    DrawWatch,
    HookWatch,
    LaneRandom,
    MiniBatchSeeds,
    setters_noted,
)

_log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "inline", "threads", "split")
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a thread
per lane; ``split``: also with backwards in two parts where possible."""

Compute = Callable[[Action, Any], Any]
"""Runs an action, given the result of the same action on the stage ``Program.before``, or None if
there is no such stage; returns its own result."""


class Runner:
    """Runs the actions of one mini-batch one after another on the calling thread, and seeds each
    (stage, micro-batch). The constructor draws a number from the default CPU generator.

    Args:
        split: whether backwards run in two parts.
        fuses: whether all stages run as one task where possible.
        record: called with the seconds that the mini-batch took, when it has ended.

    Attributes:
        tasks: one per stage, or a single one of all stages.
        saw_tensor_hooks: whether a forward made hooks on tensors, if backwards run in two parts.
    """

    def __init__(
        self,
        stages: Stages,
        signature: Signature,
        *,
        split: bool = False,
        fuses: bool = False,
        record: Callable[[float], object] | None = None,
    ) -> None:
        schedule, micro_batches = signature.schedule, signature.micro_batches
        most_lanes = min(schedule.lanes(len(stages.tasks)), micro_batches)
        # The same number inline and on lanes, so that the execution cannot change the bits.
        self._threads = torch.get_num_threads()
        if stages.traits.one_thread is None:
            self._threads = max(1, self._threads // most_lanes)
        self.tasks = [stages.fused] if fuses and stages.fused is not None else stages.tasks
        self.program = schedule.program(len(self.tasks), micro_batches, split=split)
        self.saw_tensor_hooks = False
        self._stages = stages
        self._observed = stages.observed
        self._grad = signature.grad
        self._record = record
        self._seconds = 0.0
        self._seeds = MiniBatchSeeds(stages.devices)

    def run(self, program: Program, compute: Compute) -> None:
        """Run all actions of ``program``: that of the mini-batch, or its forwards or backwards."""
        order = program.order
        if self._stages.with_streams:
            order = order_of_issue(program, self._stages.done_when_issued)
        with lanes.intra_op_threads(self._threads):
            _Exchange(program, compute).run(order)

    def note(self, program: Program, seconds: float) -> None:
        """Note how long :meth:`run` took."""
        self._seconds += seconds
        ended = program is not self.program.forwards or not self._grad
        if ended and self._record is not None:
            self._record(self._seconds)

    def seeded(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """A context for a forward or its recomputation, made and entered on its thread: both get
        the same numbers from torch's default generators."""
        seeded = self._seeds.inline(micro_batch, stage)
        # A function mode takes time: have one only where hooks must be seen.
        return self._watched(HookWatch()) if self.program.splits else seeded

    def in_backward(self) -> AbstractContextManager[Any]:
        """The context in which autograd runs a graph's backward."""
        return nullcontext()

    @contextmanager
    def _watched(self, watch: HookWatch) -> Iterator[None]:
        with watch:
            yield
        if watch.saw_tensor_hooks:  # Not `|=`, which is not atomic: lanes run this concurrently.
            self.saw_tensor_hooks = True
        if isinstance(watch, LaneRandom) and watch.drew:
            self._observed.draws = True


class Audited(Runner):
    """Runs the actions as :class:`Runner`, and checks whether lanes could seed all random
    numbers."""

    @contextmanager
    def seeded(self, micro_batch: int, stage: int) -> Iterator[None]:
        watch = self._seeds.audited(micro_batch, stage)
        with self._watched(watch), setters_noted(watch.note_set):
            yield
        watch.check()
        self._observed.hidden_randomness |= watch.hidden
        self._observed.sets |= watch.sets

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        # A layer that recomputes its forward restores the state of the process-wide generator,
        # which other lanes also use.
        observed = self._observed
        with DrawWatch(observed.note_hidden_randomness), setters_noted(observed.note_set):
            yield


class Lanes(Runner):
    """Runs each lane of the program on its own thread, the last one on the calling thread.
    When an action raises, the other lanes stop at their next action, and the first exception is
    raised here, with its traceback."""

    def in_backward(self) -> AbstractContextManager[Any]:
        return DrawWatch(self._observed.refuse_hidden_randomness)

    def seeded(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        return self._watched(self._seeds.on_lane(micro_batch, stage))

    def run(self, program: Program, compute: Compute) -> None:
        if needs_this_thread():  # The caller may have entered a mode for the backward alone.
            super().run(program, compute)
            return
        exchange, context = _Exchange(program, compute), CallerContext()

        def run_lane(actions: Sequence[Action]) -> None:
            try:
                with context.applied():
                    exchange.run(actions)
            except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                exchange.fail(error)

        jobs = [partial(run_lane, lane) for lane in program.lanes]
        try:
            lanes.run_together(jobs, threads=self._threads, interrupted=exchange.fail)
            if exchange.failures:
                raise exchange.failures[0]
        finally:
            # Break the cycle with the exception's frames, which keeps the mini-batch's memory.
            exchange.failures.clear()


class _Exchange:
    """Runs actions, and passes their results on: by a queue per receiving stage and direction. In
    every schedule a stage handles micro-batches in the order of the one that it receives from."""

    def __init__(self, program: Program, compute: Compute) -> None:
        self.failures: list[BaseException] = []
        self._program = program
        self._compute = compute
        self._inboxes: dict[tuple[int, bool], SimpleQueue[Any]] = {
            (stage, goes_up): SimpleQueue()
            for stage in range(program.stages)
            for goes_up in (False, True)
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Run ``actions`` in order, until there is a failure."""
        for action in actions:
            value = None
            if self._program.before(action) is not None:
                value = self._inboxes[action.stage, action.goes_up].get()
            if self.failures:
                return
            result = self._compute(action, value)
            receiver = self._program.after(action)
            if receiver is not None:
                self._inboxes[receiver, action.goes_up].put(result)

    def fail(self, error: BaseException) -> None:
        """Stop all lanes."""
        self.failures.append(error)
        for inbox in self._inboxes.values():
            inbox.put(None)  # Wakes the lane that waits.


class Runners:
    """Makes the runners of a pipe's mini-batches; ``execution`` is one of ``EXECUTIONS``."""

    def __init__(self, stages: Stages, execution: str) -> None:
        self._stages = stages
        self._execution = execution
        self._auto: dict[Signature, Auto] = {}
        self._logged: set[tuple[Schedule, int, str, str]] = set()

    def make(self, signature: Signature, *, fuses: bool) -> Runner:
        """The runner of the next mini-batch; ``fuses`` is that of :class:`Runner`."""
        execution, why, record = "inline", self._why_inline(signature), None
        if why is None and self._execution == "auto":
            auto = self._auto.get(signature) or self._auto.setdefault(signature, Auto(signature))
            execution = auto.choose()
            record = partial(auto.record, execution)
        elif why is None:
            execution, why = self._execution, f"execution={self._execution!r} asks for it"
            if execution == "split" and not signature.may_split:
                execution, why = "threads", f"{why}, but no backward here can run in two parts"
        if why is not None and _log.isEnabledFor(logging.INFO):
            self._log_choice(signature, execution, why)
        if execution in ("threads", "split"):
            split = execution == "split"
            return Lanes(self._stages, signature, split=split, record=record)
        inline = Audited if execution == FIRST else Runner
        return inline(self._stages, signature, fuses=fuses, record=record)

    def _why_inline(self, signature: Signature) -> str | None:
        """Why the next mini-batch has to run on the calling thread; None if it need not."""
        if self._execution == "inline":
            return "execution='inline' asks for it"
        if self._stages.traits.one_thread is not None:
            return self._stages.traits.one_thread
        if min(len(self._stages.tasks), signature.micro_batches) < 2:
            return "a single stage or micro-batch has nothing to run beside"
        if needs_this_thread():
            return "a mode, the profiler or hooks on saved tensors observe the calling thread"
        if self._stages.traits.draw_hidden_dropout():
            return "a recurrent layer draws its dropout inside one call"
        if self._stages.observed.needs_one_thread():
            return "layers draw random numbers that lanes cannot seed apart"
        return None

    def _log_choice(self, signature: Signature, execution: str, why: str) -> None:
        """Log a choice when it is first made; :class:`Auto` logs those by time."""
        choice = (signature.schedule, signature.micro_batches, execution, why)
        if choice not in self._logged:
            self._logged.add(choice)
            name, micro_batches = signature.schedule.name, signature.micro_batches
            message = "a pipe of %d stages, %s, %d micro-batches: %s (%s)"
            _log.info(message, len(self._stages.tasks), name, micro_batches, execution, why)
