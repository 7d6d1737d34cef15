"""Pipeline schedules as data: who runs which micro-batch, in which order.

Nothing here touches a tensor or a thread: the executors (``executor.py``) run programs,
:func:`simulate` predicts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One unit of work: the forward (``F``) or backward (``B``) of a micro-batch on a stage."""

    kind: Kind
    stage: int
    micro_batch: int


class Program:
    """Per stage, the actions that it runs, in order.

    Args:
        lanes: one sequence of actions per stage.
    """

    def __init__(self, lanes: Sequence[Sequence[Action]]) -> None:
        self.lanes = tuple(tuple(lane) for lane in lanes)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lanes)

    def first(self, kind: Kind) -> int:
        """The stage where a micro-batch's forward, or backward, begins."""
        return 0 if kind == "F" else self.stages - 1

    def last(self, kind: Kind) -> int:
        """The stage where a micro-batch's forward, or backward, ends."""
        return self.stages - 1 if kind == "F" else 0

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions in one order that a single thread can run."""
        return linearize(self)

    @cached_property
    def forwards(self) -> Program:
        """The forwards alone."""
        return Program([[a for a in lane if a.kind == "F"] for lane in self.lanes])

    @cached_property
    def backwards(self) -> Program:
        """The backwards alone."""
        return Program([[a for a in lane if a.kind == "B"] for lane in self.lanes])


@lru_cache(maxsize=256)
def gpipe(stages: int, micro_batches: int) -> Program:
    """The schedule of GPipe (Huang et al., 2019): every forward, then every backward, last
    micro-batch first.

    The last micro-batch leads the backward because ``checkpoint='except_last'`` keeps its
    activations: while the others are recomputed, it already travels up the pipeline.
    """
    return Program(
        [
            [Action("F", stage, m) for m in range(micro_batches)]
            + [Action("B", stage, m) for m in reversed(range(micro_batches))]
            for stage in range(stages)
        ]
    )


class _Progress:
    """Which actions of a program are done, and whether a lane's next one may start."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.next = [0] * program.stages
        self.done: set[Action] = set()
        self.all = {action for lane in program.lanes for action in lane}

    def head(self, lane: int) -> Action | None:
        position = self.next[lane]
        actions = self.program.lanes[lane]
        return actions[position] if position < len(actions) else None

    def needs(self, action: Action) -> list[Action]:
        """What must be done before ``action``: the same on the stage before, and for a backward its
        own forward."""
        kind, stage, m = action
        needs = []
        if stage != self.program.first(kind):
            needs.append(Action(kind, stage - 1 if kind == "F" else stage + 1, m))
        if kind == "B":
            needs.append(Action("F", stage, m))
        # A program may hold one phase alone; what it does not contain has happened before.
        return [need for need in needs if need in self.all]

    def ready(self, action: Action) -> bool:
        return all(need in self.done for need in self.needs(action))

    def finish(self, lane: int, action: Action) -> None:
        self.next[lane] += 1
        self.done.add(action)


def linearize(program: Program) -> tuple[Action, ...]:
    """One order of all actions that a single thread can run: as deep as possible first, so that
    little is in flight.

    Raises:
        ValueError: the program cannot be run by any order (its lanes wait for each other).
    """
    progress = _Progress(program)
    order: list[Action] = []
    while len(order) < len(progress.all):
        heads = [(lane, progress.head(lane)) for lane in range(program.stages)]
        runnable = [(lane, a) for lane, a in heads if a is not None and progress.ready(a)]
        if not runnable:
            waiting = [a for _, a in heads if a is not None]
            raise ValueError(f"the program deadlocks: its lanes wait at {waiting}")
        # Forwards go down the pipeline, backwards up: the furthest along its way is the deepest.
        lane, action = max(
            runnable, key=lambda la: (la[1].kind == "B", la[0] if la[1].kind == "F" else -la[0])
        )
        progress.finish(lane, action)
        order.append(action)
    return tuple(order)


@dataclass(frozen=True)
class Simulation:
    """What :func:`simulate` predicts; times are in the unit of the costs it was given."""

    start: dict[Action, float]
    makespan: float
    bubble: float
    """Idle share of ``stages x makespan``, 0 to 1."""
    in_flight: tuple[int, ...]
    """Per stage, the most micro-batches whose forward was done and whose backward was not."""


def simulate(program: Program, cost: Callable[[Action], float] = lambda action: 1.0) -> Simulation:
    """Run ``program`` on ideal lanes, one per stage, without communication cost.

    Args:
        program: per stage, its actions in order.
        cost: duration of an action, in any unit.

    Raises:
        ValueError: the program deadlocks.
    """
    progress = _Progress(program)
    end: dict[Action, float] = {}
    start: dict[Action, float] = {}
    clock = [0.0] * program.stages
    held = [0] * program.stages
    peak = [0] * program.stages
    for action in program.order:
        lane = action.stage
        begin = max([clock[lane], *(end[need] for need in progress.needs(action))])
        start[action] = begin
        end[action] = clock[lane] = begin + cost(action)
        held[lane] += 1 if action.kind == "F" else -1
        peak[lane] = max(peak[lane], held[lane])
    makespan = max(end.values(), default=0.0)
    busy = sum(cost(action) for action in end)
    bubble = 1.0 - busy / (program.stages * makespan) if makespan > 0 else 0.0
    return Simulation(start, makespan, bubble, tuple(peak))
