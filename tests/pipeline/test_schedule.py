"""Schedules: order, predicted times and memory, and absence of deadlocks."""

from itertools import accumulate
from typing import Any

import pytest

from pipekernels.pipeline.schedule import (
    SCHEDULES,
    Action,
    Program,
    Schedule,
    gpipe,
    interleaved,
    order_of_issue,
    simulate,
    units,
)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_orders_keep_lanes_and_dependencies(name: str, stages: int, micro_batches: int) -> None:
    schedule = Schedule(name, min(2, stages) if name == "interleaved" else None)
    program = schedule.program(stages, micro_batches)
    for part in (program, program.forwards, program.backwards):
        for order in (part.order, order_of_issue(part, frozenset({0}))):
            position = {action: i for i, action in enumerate(order)}
            assert sorted(order) == sorted(action for lane in part.lanes for action in lane)
            for lane in part.lanes:
                assert [position[a] for a in lane] == sorted(position[a] for a in lane)
            for action in order:
                kind, stage, m = action
                kinds: Any = "F" if kind == "F" else "BI"
                to = stage + 1 if kind == "F" else stage - 1
                for receiver in {Action(k, to, m) for k in kinds if kind != "W"} & position.keys():
                    assert position[action] < position[receiver]


def test_devices_with_two_stages_each_are_kept_busy() -> None:
    """Two devices, with stages 0 and 2, and 1 and 3, run tasks in the order of issue.

    In depth-first order, each microbatch would wait for the one before to pass all stages.
    """
    program = gpipe(4, 8).forwards
    spans = []
    for order in (program.order, order_of_issue(program)):
        free = [0.0, 0.0]
        done: dict[Action, float] = {}
        for action in order:
            device = action.stage % 2
            ready = done.get(Action("F", action.stage - 1, action.micro_batch), 0.0)
            free[device] = done[action] = max(free[device], ready) + 1
        spans.append(max(free))
    assert spans == [8 * 4 - 7, 16 + 1]  # 16 tasks each; the second device begins one later.


def test_the_thread_runs_the_stages_on_the_cpu_last() -> None:
    order = order_of_issue(gpipe(3, 4).forwards, frozenset({0}))
    assert order.index(Action("F", 1, 0)) < order.index(Action("F", 0, 1))
    assert order.index(Action("F", 2, 0)) < order.index(Action("F", 0, 2))


def test_a_program_that_deadlocks_is_an_error() -> None:
    lanes = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)],
    ]
    with pytest.raises(ValueError, match="deadlocks"):
        _ = Program(lanes).order


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_every_program_is_complete_and_can_run(name: str, micro_batches: int, stages: int) -> None:
    program = Schedule(name).program(stages, micro_batches)
    order = program.order
    assert len(order) == len(set(order))
    for stage in range(stages):
        kinds = {
            k: [a.micro_batch for a in order if (a.type, a.stage) == (k, stage)] for k in "FBIW"
        }
        assert sorted(kinds["F"]) == list(range(micro_batches))
        assert sorted(kinds["F"]) == sorted(kinds["B"] + kinds["I"])
        assert kinds["W"] == kinds["I"]  # In the same order, so that sums have the same bits.
        assert bool(kinds["I"]) == (stage > 0 and name == "zb-h1")
        assert {action.stage for action in program.lanes[stage]} == {stage}
    if name == "gpipe":
        simulation = simulate(program)
        assert simulation.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert simulation.makespan == pytest.approx(3 * (micro_batches + stages - 1))
        assert _most_held(program) == [micro_batches] * stages


def _most_held(program: Program) -> list[int]:
    """Per lane, the most (stage, microbatch) pairs whose activations it holds at once.

    It holds them from their forward to their backward, or the backward's second part.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate(change[action.type] for action in lane)) for lane in program.lanes]


def test_makespan_and_memory_of_all_schedules() -> None:
    """The values in the literature, for B = 2 F and I = W = F."""
    for stages, m in ((2, 4), (4, 8), (4, 16)):
        programs = {name: Schedule(name).program(stages, m) for name in ("gpipe", "1f1b", "zb-h1")}
        runs = {name: simulate(program) for name, program in programs.items()}
        assert runs["gpipe"].makespan == runs["1f1b"].makespan == 3 * (m + stages - 1)
        # A third of 1F1B's bubble (Qi et al., 2023).
        assert runs["zb-h1"].makespan == 3 * m + (stages - 1)
        assert _most_held(programs["gpipe"]) == [m] * stages
        assert _most_held(programs["1f1b"]) == list(range(stages, 0, -1))
        assert _most_held(programs["zb-h1"]) == [stages] * stages
        halves = interleaved(stages, 2 * stages, m)
        makespan = simulate(halves, lambda a: units(a) / 2).makespan
        assert makespan == 3 * (m + (stages - 1) / 2)
        # The forwards before a lane's first backward (Narayanan et al., 2021), and one more.
        warm_up = [2 * (stages - lane - 1) + stages for lane in range(stages)]
        assert _most_held(halves) == [each + 1 for each in warm_up]


def test_unknown_schedules() -> None:
    with pytest.raises(ValueError, match="must be one of gpipe, 1f1b, interleaved, zb-h1"):
        Schedule("f1b1")
    with pytest.raises(ValueError, match="multiple"):
        Schedule("interleaved", 2).program(3, 4)
    assert Schedule("1F1B") == Schedule("1f1b")
