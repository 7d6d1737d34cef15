"""Chooses how a mini-batch runs, once, before the mini-batch exists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from pipekernels.pipeline.engine.findings import ObservedLayerBehavior
from pipekernels.pipeline.engine.pace import Kind, Pace, Pass, Way
from pipekernels.pipeline.engine.randomness import Mode, TaskRandomness
from pipekernels.pipeline.engine.stages import LayerTraits, Stages
from pipekernels.pipeline.schedule.program import Program, Schedule
from pipekernels.pipeline.stage.context import needs_this_thread
from pipekernels.pipeline.stage.parameters import StageParameters
from pipekernels.pipeline.stage.task import Task
from pipekernels.pipeline.values.micro_batch import Scatter

_log = logging.getLogger(__name__)

EXECUTIONS = ("auto", "inline", "threads", "split")
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a thread
per lane; ``split``: also with backwards in two parts where possible."""


class Execution(NamedTuple):
    """How one mini-batch runs."""

    way: Way
    tasks: Sequence[Task]
    """One per stage, or a single one of all stages."""
    program: Program
    """The actions of ``tasks``, in order."""
    threads: int
    """Intra-op threads of each task."""
    randomness: TaskRandomness
    in_backward: Callable[[], AbstractContextManager[Any]]
    """Makes the context for running autograd."""
    timing: Pass | None
    """Records the time taken; None if the execution was not chosen by time."""


class Chooser:
    """Chooses for the mini-batches of one pipe.

    Args:
        stages: the pipe's.
        findings: about their layers.
        execution: one of ``EXECUTIONS``.
    """

    def __init__(self, stages: Stages, findings: ObservedLayerBehavior, execution: str) -> None:
        self._stages = stages
        self._findings = findings
        self._execution = execution
        self._pace = Pace()
        self._logged: set[tuple[Schedule, int, Way, str]] = set()

    def choose(
        self,
        traits: LayerTraits,
        schedule: Schedule,
        scatter: Scatter,
        parameters: Sequence[StageParameters] | None,
        recomputed: int,
        *,
        may_split: bool,
        has_timeline: bool,
    ) -> Execution:
        """How the next mini-batch runs.

        Args:
            traits: of the layers.
            schedule: the order of forwards and backwards.
            scatter: the micro-batches.
            parameters: the stages', None where no backward can follow.
            recomputed: number of micro-batches that are recomputed.
            may_split: whether backwards that are whole in the schedule may run in two parts. False
                for a schedule that the user chose.
            has_timeline: whether a timeline records, which needs the stages unfused.
        """
        stages = self._stages
        micro_batches = len(scatter)
        lanes = schedule.lanes(len(stages.tasks))  # May raise, whatever the execution.
        grad = parameters is not None
        may_split = may_split and grad and not recomputed
        why_inline = self._why_inline(traits, micro_batches)
        way: Way = "inline"
        mode: Mode = "inline"
        timing: Pass | None = None
        if why_inline is None and self._execution == "auto":
            size_bits = scatter.elements(0).bit_length()
            timing = Pass(
                self._pace,
                Kind(
                    schedule,
                    micro_batches,
                    size_bits,
                    grad,
                    traits.training,
                    recomputed,
                    may_split,
                ),
            )
            way = timing.way
            mode = "audited" if timing.is_first else "inline" if way == "inline" else "threads"
        elif why_inline is None:
            way = "split" if self._execution == "split" and may_split else "threads"
            mode = "threads"
        tasks: Sequence[Task] = stages.tasks
        if way == "inline" and stages.fused is not None and not has_timeline:
            tasks = [stages.fused]
        program = schedule.program(len(tasks), micro_batches, split=way == "split")
        findings = self._findings
        if mode == "inline" and (program.splits or (recomputed and not findings.knows_generators)):
            mode = "hooks"
        findings.knows_generators |= mode != "inline"
        # The same number inline and on lanes, so that the execution cannot change the bits.
        threads = torch.get_num_threads()
        if traits.one_thread is None:
            threads = max(1, threads // min(lanes, micro_batches))
        if _log.isEnabledFor(logging.INFO):
            self._log_choice(schedule, micro_batches, way, why_inline)
        randomness = TaskRandomness(stages, findings, mode)
        return Execution(way, tasks, program, threads, randomness, randomness.in_backward, timing)

    def _why_inline(self, traits: LayerTraits, micro_batches: int) -> str | None:
        """Why the next mini-batch has to run on the calling thread; None if it need not."""
        if self._execution == "inline":
            return "execution='inline' asks for it"
        if traits.one_thread is not None:
            return traits.one_thread
        if min(len(self._stages.tasks), micro_batches) < 2:
            return "a single stage or micro-batch has nothing to run beside"
        if needs_this_thread():
            return "a mode, the profiler or hooks on saved tensors observe the calling thread"
        if traits.draw_hidden_dropout():
            return "a recurrent layer draws its dropout inside one call"
        if self._findings.needs_one_thread():
            return "layers draw random numbers that lanes cannot seed apart"
        return None

    def _log_choice(
        self, schedule: Schedule, micro_batches: int, way: Way, why_inline: str | None
    ) -> None:
        """Log a choice when it is first made; :class:`Pace` logs those by time."""
        why = why_inline
        if why is None:
            if self._execution == "auto":
                return
            why = f"execution={self._execution!r} asks for it"
            if self._execution != way:
                why += ", but no backward here can run in two parts"
        choice = (schedule, micro_batches, way, why)
        if choice not in self._logged:
            self._logged.add(choice)
            stages = len(self._stages.tasks)
            _log.info(
                "a pipe of %d stages, %s, %d micro-batches: %s (%s)",
                *(stages, schedule.name, micro_batches, way, why),
            )
