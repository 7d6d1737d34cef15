"""Runs the actions of one mini-batch: on the calling thread, or with a thread per lane.

Results do not depend on the runner: all run the same operations on the same number of intra-op
threads with the same random numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from pipekernels.device.restoring import restore_despite_interrupt
from pipekernels.pipeline.engine import lanes
from pipekernels.pipeline.engine.auto import FIRST, Auto
from pipekernels.pipeline.engine.stages import Stages
from pipekernels.pipeline.schedule.program import Action, Program, Schedule, order_of_issue
from pipekernels.pipeline.stage.context import CallerContext, entered, needs_this_thread
from pipekernels.pipeline.stage.other_random import OtherRandom, States
from pipekernels.pipeline.stage.random_state import (
    BackwardWatch,
    DrawWatch,
    HookWatch,
    LaneRandom,
    MiniBatchSeeds,
)
from pipekernels.pipeline.stage.task import Task

_log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "inline", "threads", "split")
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a thread
per lane; ``split``: also with backwards in two parts where possible."""

Compute = Callable[[Action, Any], Any]
"""Runs an action, given the result of the same action on the stage ``Program.before``, or None if
there is no such stage; returns its own result."""

Record = Callable[[float], None]
"""Takes the seconds that a mini-batch took."""


class Signature(NamedTuple):
    """Mini-batches with equal ones are expected to take about equally long."""

    schedule: Schedule
    micro_batches: int
    size_bits: int
    """Length, in bits, of the number of elements of a micro-batch."""
    grad: bool
    """Whether a backward can follow."""
    training: tuple[bool, ...]
    """Training flag of each layer."""
    recomputed: int
    """Number of recomputed micro-batches."""
    trains: bool
    """Whether it is a training step, whose schedule the user chose."""

    @property
    def may_split(self) -> bool:
        """Whether backwards that are whole in the schedule may run in two parts."""
        return self.grad and not self.recomputed and not self.trains

    def __str__(self) -> str:
        return (
            f"{self.schedule.name} of {self.micro_batches} micro-batches of less than "
            f"2**{self.size_bits} elements, {'with' if self.grad else 'without'} gradients, "
            f"{self.recomputed} recomputed"
        )


class Runner:
    """Runs the actions of one mini-batch, and seeds each (stage, micro-batch). The constructor
    draws a number from the default CPU generator.

    Args:
        stages: the pipe's.
        signature: of the mini-batch.
        tasks: one per stage, or a single one of all stages.
        split: whether backwards run in two parts.
        record: called when the mini-batch has ended.

    Attributes:
        tasks: as above.
        program: their actions, in order.
        saw_tensor_hooks: whether a forward made hooks on tensors; only if the program has backwards
            in two parts.

    Raises:
        ValueError: the schedule is not possible for so many stages.
    """

    is_parallel = False

    def __init__(
        self,
        stages: Stages,
        signature: Signature,
        tasks: Sequence[Task],
        *,
        split: bool = False,
        record: Record | None = None,
    ) -> None:
        schedule, micro_batches = signature.schedule, signature.micro_batches
        # The same number inline and on lanes, so that the execution cannot change the bits.
        self._threads = torch.get_num_threads()
        most_lanes = min(schedule.lanes(len(stages.tasks)), micro_batches)
        if stages.traits.one_thread is None:
            self._threads = max(1, self._threads // most_lanes)
        self.tasks = tasks
        self.program = schedule.program(len(tasks), micro_batches, split=split)
        self.saw_tensor_hooks = False
        self._stages = stages
        self._observed = stages.observed
        self._grad = signature.grad
        self._record = record
        self._seconds = 0.0
        self._seeds = MiniBatchSeeds(stages.devices)
        self._other_random = OtherRandom(stages.modules, self._observed.generators)

    def run(self, program: Program, compute: Compute) -> None:
        """Run all actions of ``program``: that of the mini-batch, or its forwards or backwards."""
        begin = time.perf_counter()
        self._run(program, compute)
        self._seconds += time.perf_counter() - begin
        ended = program is not self.program.forwards or not self._grad
        if ended and self._record is not None:
            self._record(self._seconds)

    def seeded(
        self, micro_batch: int, stage: int, *, repeatable: bool = False
    ) -> AbstractContextManager[Any]:
        """A context for a forward, entered on its thread; ``repeatable``: :meth:`repeated` gives
        its random numbers again."""
        if repeatable:
            return self._repeatable(micro_batch, stage)
        return self._seeded(micro_batch, stage, {})

    @contextmanager
    def repeated(self, micro_batch: int, stage: int) -> Iterator[None]:
        """A context for a recomputation, which gets the random numbers of its forward."""
        other = self._other_random
        drew = other.drew(stage, micro_batch)
        with self._turn(drew), self._seeded(micro_batch, stage, {}):
            alone = not self.is_parallel
            with other.replayed(stage, micro_batch, alone=alone) if drew else nullcontext():
                yield

    def in_backward(self) -> AbstractContextManager[Any]:
        """The context in which autograd runs a graph's backward."""
        return nullcontext()

    @contextmanager
    def _repeatable(self, micro_batch: int, stage: int) -> Iterator[None]:
        observed = self._observed
        with self._turn(observed.draws_elsewhere):
            recorded = self._other_random.recorded(
                stage, micro_batch, observed.note_draws_elsewhere
            )
            with recorded as states, self._seeded(micro_batch, stage, states):
                yield
        observed.knows_generators = True

    def _turn(self, needed: bool) -> AbstractContextManager[Any]:
        return self._observed.turn if needed and self.is_parallel else nullcontext()

    def _run(self, program: Program, compute: Compute) -> None:
        """Run the actions one after another on the calling thread."""
        order = program.order
        if self._stages.with_streams:
            order = order_of_issue(program, self._stages.done_when_issued)
        results: dict[tuple[int, int, bool], Any] = {}  # by receiver: stage, micro-batch, direction
        with lanes.intra_op_threads(self._threads):
            for action in order:
                key = (action.stage, action.micro_batch, action.goes_up)
                value = results.pop(key) if program.before(action) is not None else None
                result = compute(action, value)
                receiver = program.after(action)
                if receiver is not None:
                    results[receiver, action.micro_batch, action.goes_up] = result

    def _seeded(self, micro_batch: int, stage: int, states: States) -> AbstractContextManager[None]:
        """Seed a task; ``states`` gets the generators that its layers give to functions."""
        raise NotImplementedError

    @contextmanager
    def _watching(self, watch: HookWatch) -> Iterator[None]:
        with entered(watch):
            yield
        if watch.saw_tensor_hooks:  # Not `|=`, which is not atomic: lanes run this concurrently.
            self.saw_tensor_hooks = True
        if isinstance(watch, LaneRandom) and watch.drew:
            self._observed.draws = True


class Inline(Runner):
    """Runs the actions one after another on the calling thread.

    Args:
        stages, signature, record: as of :class:`Runner`.
        fuses: whether to run all stages as one task where possible.
    """

    def __init__(
        self, stages: Stages, signature: Signature, *, fuses: bool, record: Record | None = None
    ) -> None:
        tasks = [stages.fused] if fuses and stages.fused is not None else stages.tasks
        super().__init__(stages, signature, tasks, record=record)
        # A function mode takes time: have one only where hooks or generators must be seen.
        self._watches = self.program.splits or (
            signature.recomputed > 0 and not self._observed.knows_generators
        )

    def _seeded(self, micro_batch: int, stage: int, states: States) -> AbstractContextManager[None]:
        seeded = self._seeds.inline(micro_batch, stage)
        return self._watching(HookWatch(states)) if self._watches else seeded


class Audited(Inline):
    """Likewise, and checks whether lanes could seed all random numbers."""

    def seeded(
        self, micro_batch: int, stage: int, *, repeatable: bool = False
    ) -> AbstractContextManager[Any]:
        return self._repeatable(micro_batch, stage)

    @contextmanager
    def _seeded(self, micro_batch: int, stage: int, states: States) -> Iterator[None]:
        watch = self._seeds.audited(micro_batch, stage, states)
        with self._watching(watch):
            yield
        if not watch.saw_everything():
            self._observed.note_hidden_randomness()

    def in_backward(self) -> AbstractContextManager[Any]:
        # A layer that recomputes its forward restores the state of the process-wide generator,
        # which other lanes use too.
        observed = self._observed
        return entered(BackwardWatch(observed.note_hidden_randomness, observed.note_restores))


class Lanes(Runner):
    """Runs each lane of the program on a thread of its own, the last one on the calling thread.

    There is one queue per receiving stage and direction. In every schedule the receiving stage
    handles micro-batches in the order of the sending one. When an action raises, the other lanes
    stop at their next action, and the first exception is raised here, with its traceback.
    """

    is_parallel = True

    def in_backward(self) -> AbstractContextManager[Any]:
        return entered(DrawWatch(self._observed.refuse_hidden_randomness))

    def _seeded(self, micro_batch: int, stage: int, states: States) -> AbstractContextManager[None]:
        return self._watching(self._seeds.on_lane(micro_batch, stage, states))

    def _run(self, program: Program, compute: Compute) -> None:
        if needs_this_thread():  # The caller may have entered a mode for the backward alone.
            super()._run(program, compute)
            return
        inboxes: dict[tuple[int, bool], SimpleQueue[Any]] = {
            (stage, goes_up): SimpleQueue()
            for stage in range(program.stages)
            for goes_up in (False, True)
        }
        failures: list[BaseException] = []
        context = CallerContext()

        def fail(error: BaseException) -> None:
            failures.append(error)
            for inbox in inboxes.values():
                inbox.put(None)  # Wakes the lane, which then sees the failure.

        @restore_despite_interrupt
        def run_actions(actions: Sequence[Action]) -> None:
            with context.applied():
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
            lanes.run_together(jobs, threads=self._threads, interrupted=fail)
            if failures:
                raise failures[0]
        finally:
            # The exception's frames refer to this list: break the cycle, which keeps the memory of
            # the mini-batch.
            failures.clear()


class Runners:
    """Makes the runners of a pipe's mini-batches.

    Args:
        stages: the pipe's.
        execution: one of ``EXECUTIONS``.
    """

    def __init__(self, stages: Stages, execution: str) -> None:
        self._stages = stages
        self._execution = execution
        self._auto: dict[Signature, Auto] = {}
        self._logged: set[tuple[Schedule, int, str, str]] = set()

    def make(self, signature: Signature, *, fuses: bool) -> Runner:
        """The runner of the next mini-batch; ``fuses``: as of :class:`Inline`."""
        stages = self._stages
        execution, why, record = "inline", self._why_inline(signature), None
        if why is None and self._execution == "auto":
            auto = self._auto.get(signature)
            if auto is None:
                split = ["split"] if signature.may_split else []
                auto = self._auto[signature] = Auto(signature, ["inline", "threads", *split])
            execution = auto.choose()
            record = partial(auto.record, execution)
        elif why is None:
            why = f"execution={self._execution!r} asks for it"
            execution = self._execution
            if execution == "split" and not signature.may_split:
                execution = "threads"
                why += ", but no backward here can run in two parts"
        if why is not None and _log.isEnabledFor(logging.INFO):
            self._log_choice(signature, execution, why)
        if execution in ("threads", "split"):
            split_ = execution == "split"
            return Lanes(stages, signature, stages.tasks, split=split_, record=record)
        inline = Audited if execution == FIRST else Inline
        return inline(stages, signature, fuses=fuses, record=record)

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
