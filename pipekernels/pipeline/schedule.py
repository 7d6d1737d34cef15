"""Pipeline schedules as data: the actions of each lane, in order. No tensors here: the engine runs
programs, :func:`simulate` predicts their times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

from pipekernels._arguments import integer

ScheduleName = Literal["gpipe", "1f1b", "1F1B", "interleaved", "zb-h1"]
ActionType = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One unit of work on one microbatch in one stage.

    ``F``: forward. ``B``: backward. ``I`` and ``W``: the backward in two parts, first the gradients
    of the stage's inputs, then of its parameters.
    """

    type: ActionType
    stage: int
    micro_batch: int


class Program:
    """The actions of each lane, in order. A stage belongs to one lane."""

    def __init__(self, lanes: Iterable[Iterable[Action]]) -> None:
        self.lanes = tuple(tuple(lane) for lane in lanes)

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions, in an order in which a single thread can run them: backwards first, then
        microbatches furthest along, so that few are in flight. A ValueError if the lanes wait for
        each other."""
        return tuple(simulate(self).start)

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """The lane of each stage."""
        return {action.stage: i for i, lane in enumerate(self.lanes) for action in lane}

    @cached_property
    def is_split(self) -> bool:
        """Whether there are backwards in two parts."""
        return any(action.type == "I" for action in self.order)

    @cached_property
    def forwards(self) -> Program:
        """The forwards alone."""
        return Program([[a for a in lane if a.type == "F"] for lane in self.lanes])

    @cached_property
    def backwards(self) -> Program:
        """The backwards alone."""
        return Program([[a for a in lane if a.type != "F"] for lane in self.lanes])


Pairs = Sequence[tuple[int, int]]
"""Stages and microbatches."""


def _lane(forwards: Pairs, backwards: Pairs, ahead: int, lag: int = 0) -> list[Action]:
    """``ahead`` of the forwards, then a backward and a forward in turn. With a ``lag``, backwards
    are in two parts, W that many backwards behind I."""
    # A lag of `stage` keeps the earlier stages busy. More would cost memory, because the graph of a
    # microbatch lives until its W. No stage waits for stage 0, whose backwards are whole.
    later = [Action("F", *pair) for pair in forwards]
    firsts = [Action("I" if lag else "B", *pair) for pair in backwards]
    seconds = [*[None] * lag, *(Action("W", *pair) for pair in backwards if lag)]
    turns = zip_longest(firsts, seconds, later[ahead:])
    return [*later[:ahead], *(action for turn in turns for action in turn if action is not None)]


def gpipe(stages: int, micro_batches: int) -> Program:
    """GPipe (Huang et al., 2019): every forward, then every backward, the last microbatch first:
    ``checkpoint='except_last'`` keeps its activations, so earlier stages can begin while the others
    are recomputed."""
    lanes = []
    for stage in range(stages):
        pairs = [(stage, m) for m in range(micro_batches)]
        lanes.append(_lane(pairs, pairs[::-1], ahead=micro_batches))
    return Program(lanes)


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """1F1B (Narayanan et al., PipeDream, 2019, with a flush): after ``stages - stage`` forwards, a
    backward and a forward in turn. A stage holds the activations of at most ``stages - stage``
    microbatches."""
    return interleaved(stages, stages, micro_batches)


def zb_h1(stages: int, micro_batches: int) -> Program:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023): 1F1B with backwards in two parts,
    so that gradients reach earlier stages sooner and the second parts fill the bubble at the end. A
    stage holds the activations of at most ``stages`` microbatches, as the first does in 1F1B."""
    lanes = []
    for stage in range(stages):
        pairs = [(stage, m) for m in range(micro_batches)]
        lanes.append(_lane(pairs, pairs, ahead=stages - stage, lag=stage))
    return Program(lanes)


def interleaved(lanes: int, stages: int, micro_batches: int) -> Program:
    """Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): lane ``i`` runs the stages ``i``,
    ``i + lanes``, ``i + 2 * lanes``, ... More stages per lane, of which ``stages`` is a multiple,
    mean a shorter bubble and more communication between lanes. With one stage per lane it is 1F1B.

    Microbatches go through a lane's stages in groups of ``lanes``, or of a few more if ``lanes``
    does not divide their number.
    """
    count = max(1, micro_batches // lanes)
    bounds = [group * micro_batches // count for group in range(count + 1)]
    groups = [range(begin, end) for begin, end in pairwise(bounds)]
    largest = max(len(group) for group in groups)
    rows = []
    for lane in range(lanes):
        own = range(lane, stages, lanes)
        forwards = [(stage, m) for group in groups for stage in own for m in group]
        backwards = [(stage, m) for group in groups for stage in reversed(own) for m in group]
        # Forwards until the first backward arrives: one per lane from here to the last; with more
        # stages per lane, one per lane on the way back, after a group in each stage but the last.
        ahead = lanes - lane
        if len(own) > 1:
            ahead += (lanes - lane - 1) + (len(own) - 1) * largest
        rows.append(_lane(forwards, backwards, ahead))
    return Program(rows)


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, one of :data:`SCHEDULES`, for any number of stages and microbatches;
    ``interleave`` is the number of lanes of ``'interleaved'``. A ValueError if it is missing, below
    1 or given for another schedule, or if ``name`` is unknown."""

    name: str
    interleave: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.name).lower())  # 1F1B as its authors write it.
        if self.name not in SCHEDULES:
            raise ValueError(f"schedule is {self.name!r}; it must be one of {', '.join(SCHEDULES)}")
        if (self.interleave is not None) != (self.name == "interleaved"):
            raise ValueError(
                f"the number of lanes is {self.interleave} with schedule {self.name!r}; "
                "'interleaved' needs a number of lanes, and the others have one lane per stage"
            )
        if self.interleave is not None:
            integer("the number of lanes", self.interleave)

    def lanes(self, stages: int) -> int:
        """Number of lanes for ``stages`` stages; ValueError if it does not divide ``stages``."""
        lanes = min(self.interleave or stages, stages)
        if stages % lanes:
            raise ValueError(
                f"{stages} stages cannot be divided evenly among {lanes} lanes; use a multiple of "
                f"{lanes}"
            )
        return lanes

    @lru_cache(maxsize=256)  # noqa: B019 (There are few schedules.)
    def program(self, stages: int, micro_batches: int) -> Program:
        lanes = () if self.interleave is None else (self.lanes(stages),)
        return SCHEDULES[self.name](*lanes, stages, micro_batches)


SCHEDULES: dict[str, Callable[..., Program]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}
GPIPE = Schedule("gpipe")
schedule_of = lru_cache(maxsize=256)(Schedule)
"""A schedule by its name and number of lanes."""


@lru_cache(maxsize=256)
def order_of_issue(program: Program, on_host: frozenset[int] = frozenset()) -> tuple[Action, ...]:
    """The order in which ideal lanes would start the actions, for a thread that issues them to
    devices asynchronously. Actions of the stages ``on_host``, which the thread runs itself, come
    after others that could start at the same time."""
    # A device runs actions in the order of issue, so one that cannot start yet blocks others.
    start = simulate(program).start
    return tuple(sorted(program.order, key=lambda action: (start[action], action.stage in on_host)))


class Simulation(NamedTuple):
    """What :func:`simulate` predicts; times are in the unit of the costs it was given.

    Attributes:
        start: of each action, in the order of ``Program.order``.
        bubble: idle share of ``lanes x makespan``, 0 to 1.
    """

    start: dict[Action, float]
    makespan: float
    bubble: float


def units(action: Action) -> float:
    """Default duration of ``action``, in units of a forward's."""
    return 2.0 if action.type == "B" else 1.0


def simulate(program: Program, cost: Callable[[Action], float] = units) -> Simulation:
    """Run ``program`` on ideal lanes, without communication cost; ``cost`` is the duration of an
    action, in any unit. A ValueError if the program deadlocks."""
    waiting = [deque(lane) for lane in program.lanes]
    actions = {action for lane in program.lanes for action in lane}
    clock = [0.0] * len(waiting)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    while any(waiting):
        # The next action of each lane. A program of backwards alone lacks the forwards they need.
        needs = {lane[0]: _needs(lane[0]) & actions for lane in waiting if lane}
        runnable = [action for action, needed in needs.items() if needed <= end.keys()]
        if not runnable:
            raise ValueError(f"the program deadlocks: its lanes wait at {list(needs)}")
        # Each lane has its own clock, so this choice changes the order of `start`, but no time.
        action = max(runnable, key=_progress)
        row = program.lane_of[action.stage]
        start[action] = max([clock[row], *(end[need] for need in needs[action])])
        end[action] = clock[row] = start[action] + cost(action)
        waiting[row].popleft()
    makespan = max(clock, default=0.0)
    capacity = len(clock) * makespan
    bubble = 1.0 - sum(map(cost, end)) / capacity if capacity > 0 else 0.0
    return Simulation(start, makespan, bubble)


def _needs(action: Action) -> set[Action]:
    """What must be done before ``action``: the same on the stage that it receives from, and for a
    backward its forward or first part."""
    action_type, stage, m = action
    if action_type == "F":
        return {Action("F", stage - 1, m)}
    if action_type == "W":
        return {Action("I", stage, m)}
    return {Action("F", stage, m), Action("B", stage + 1, m), Action("I", stage + 1, m)}


def _progress(action: Action) -> tuple[bool, int]:
    """Larger for what a single thread should run earlier: backwards first, then what is nearest to
    its end, the last stage for a forward and the first one for a backward."""
    # The second part of a backward (W) precedes other backwards: it frees a microbatch's graph.
    return action.type != "F", -action.stage if action.type in ("B", "I") else action.stage
