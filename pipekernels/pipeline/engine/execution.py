"""Chooses how a mini-batch runs, once, before the mini-batch exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from pipekernels.pipeline.cuda_graphs.stage_graphs import GraphedTask
from pipekernels.pipeline.engine.findings import LayerFindings
from pipekernels.pipeline.engine.pace import Kind, Pace, Pass, Way
from pipekernels.pipeline.engine.randomness import Mode, TaskRandomness
from pipekernels.pipeline.engine.stages import LayerTraits, Stages
from pipekernels.pipeline.schedule.program import Program, Schedule
from pipekernels.pipeline.stage.context import needs_this_thread
from pipekernels.pipeline.stage.parameters import StageParameters
from pipekernels.pipeline.stage.task import Task
from pipekernels.pipeline.values.micro_batch import Scatter

EXECUTIONS = ("auto", "inline", "threads", "split")
"""``auto``: whichever measures fastest; ``inline``: on the calling thread; ``threads``: a thread
per lane; ``split``: also with backwards in two parts where possible."""


class Execution(NamedTuple):
    """How one mini-batch runs."""

    way: Way
    tasks: Sequence[Task | GraphedTask]
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

    def __init__(self, stages: Stages, findings: LayerFindings, execution: str) -> None:
        self._stages = stages
        self._findings = findings
        self._execution = execution
        self._pace = Pace()

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
        may_use_threads = (
            traits.may_use_threads
            and min(len(stages.tasks), micro_batches) > 1
            and not needs_this_thread()
            and not traits.draw_hidden_dropout()
            and not self._findings.needs_one_thread()
        )
        way: Way = "inline"
        mode: Mode = "inline"
        timing: Pass | None = None
        if may_use_threads and self._execution == "auto":
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
        elif may_use_threads and self._execution != "inline":
            way = "split" if self._execution == "split" and may_split else "threads"
            mode = "threads"
        tasks: Sequence[Task | GraphedTask] = stages.tasks
        if way == "inline" and stages.fused is not None and not has_timeline:
            tasks = [stages.fused]
        elif stages.graphs:
            tasks = [self._graphed(index, parameters) for index in range(len(stages.tasks))]
        program = schedule.program(len(tasks), micro_batches, split=way == "split")
        if program.splits and mode == "inline":
            mode = "hooks"
        # The same number inline and on lanes, so that the execution cannot change the bits.
        threads = torch.get_num_threads()
        if traits.may_use_threads:
            threads = max(1, threads // min(lanes, micro_batches))
        randomness = TaskRandomness(stages.devices, self._findings, mode)
        return Execution(way, tasks, program, threads, randomness, randomness.in_backward, timing)

    def _graphed(
        self, stage: int, parameters: Sequence[StageParameters] | None
    ) -> Task | GraphedTask:
        graphs = self._stages.graphs.get(stage)
        if graphs is None:
            return self._stages.tasks[stage]
        return graphs.of_run(parameters[stage] if parameters else None)
