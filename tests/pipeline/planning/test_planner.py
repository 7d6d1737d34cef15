"""Plans: predictions compared with simple reference code, choices with an exhaustive search.

No test depends on real time: costs are invented, or those of layers that advance a simulated clock.
"""

from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import Clock, Work, all_balances, slices
from torch import nn

import pipekernels
from pipekernels import Pipe
from pipekernels.local_ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.planning import planner
from pipekernels.pipeline.planning.cost import Affine, CostModel, Forecast, LayerCost, Setting
from pipekernels.pipeline.planning.memory import LiveStorages
from pipekernels.pipeline.planning.planner import choose, plan_pipeline
from pipekernels.pipeline.schedule.program import SCHEDULES, Action, gpipe, simulate
from pipekernels.pipeline.stage.checkpoint import MODES, checkpointed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DEVICES = [torch.device("cuda", i) for i in range(4)]  # Only named, never used.
SCALE = 2.0


def layer(
    forward: tuple[float, float] = (0.0, 1.0),
    backward: tuple[float, float] = (0.0, 2.0),
    input_share: float = 0.5,
    **sizes: int,
) -> LayerCost:
    """Times as (fixed, per row), sizes in bytes per row; parameters and ``constant`` in bytes."""
    per_row = {"kept": 0, "entry": 0, "inputs": 1, "outputs": 1, "working": 0}
    return LayerCost(
        Affine(*forward),
        Affine(*backward),
        Affine(*(input_share * b for b in backward)),
        **{name: Affine(0.0, sizes.get(name, default)) for name, default in per_row.items()},
        **{name: Affine(sizes.get(name, 0)) for name in ("trainable", "constant")},
    )


layer_costs = st.builds(
    layer,
    forward=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    backward=st.tuples(st.integers(0, 8), st.integers(1, 9)),
    input_share=st.sampled_from([0.0, 0.5, 1.0]),
    trainable=st.integers(0, 20),
    **dict.fromkeys(
        ("kept", "entry", "inputs", "outputs", "working", "constant"), st.integers(0, 8)
    ),
)


def settings_of(lanes: int, layers: int, batch: int, max_chunks: int) -> list[Setting]:
    return planner.possible_settings(lanes, layers, batch, max_chunks, SCHEDULES)


def step(costs: list[LayerCost], hand_off: float, setting: Setting, balance: list[int]) -> float:
    parts, lane_of = slices(balance), setting.program.lane_of

    def seconds(action: Action) -> float:
        kind, stage, m = action
        layers, rows = costs[parts[stage]], setting.rows[m]
        forward = sum(c.forward(rows) for c in layers)
        backward = sum(c.backward(rows) for c in layers)
        of_inputs = sum(c.input_backward(rows) for c in layers)
        total = {"F": forward, "B": backward, "I": of_inputs, "W": backward - of_inputs}[kind]
        if kind in "BI" and checkpointed(setting.checkpoint, m, len(setting.rows)):
            total += forward
        giver = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and lane_of.get(giver, lane_of[stage]) != lane_of[stage]:
            total += hand_off
        return total

    return simulate(setting.program, seconds).makespan


def peaks(
    costs: list[LayerCost], setting: Setting, balance: list[int], devices: list[torch.device]
) -> dict[torch.device, float]:
    rows, batch = max(setting.rows), sum(setting.rows)
    total: Counter[torch.device] = Counter()
    for stage, part in enumerate(slices(balance)):
        layers, lane = costs[part], setting.program.lane_of[stage]
        graph = sum(c.kept(rows) for c in layers) + layers[0].entry(rows) * (stage > 0)
        inputs = layers[0].inputs(rows) * (stage > 0)
        held: dict[int, float] = {}
        most = 0.0
        for kind, s, m in setting.program.lanes[lane]:
            if s != stage:
                continue
            if kind == "F":
                dropped = checkpointed(setting.checkpoint, m, len(setting.rows))
                held[m] = inputs if dropped else graph
            elif kind != "W":
                held[m] = graph
            most = max(most, sum(held.values()))
            if kind in "BW":
                del held[m]
        peak = most + max(c.working(rows) for c in layers)
        peak += sum(c.trainable(rows) * SCALE + c.constant(rows) for c in layers)
        peak += layers[0].inputs(batch) * (stage == 0)
        peak += 2 * layers[-1].outputs(batch) * (stage == len(balance) - 1)
        total[devices[lane]] += peak
    return total


@given(
    st.floats(0, 10),
    st.floats(0, 10),
    st.lists(st.integers(1, 99), min_size=2, max_size=4, unique=True),
)
def test_fit_finds_a_line(fixed: float, slope: float, xs: list[int]) -> None:
    line = Affine.fit([(x, fixed + slope * x) for x in xs])
    for x in xs:
        assert line(x) == pytest.approx(fixed + slope * x, rel=1e-6, abs=1e-6)


def test_fit_has_no_negative_coefficients() -> None:
    assert Affine.fit([(1, 1.0), (2, 4.0)]).fixed == 0
    assert Affine.fit([(1, 4.0), (2, 1.0)]).slope == 0
    assert Affine.fit([(5, 10.0)]) == Affine(0.0, 2.0)
    assert Affine.fit([(0, 3.0)]) == Affine(3.0, 0.0)
    assert Affine.fit([(1, 0.0), (8, 0.0)])(4) == 0
    # Small times count as much as large ones.
    line = Affine.fit([(1, 1.0), (100, 110.0), (100, 90.0)])
    assert line(1) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("mode", "held"), [("never", {(4, 0)}), ("except_last", {(1, 3)}), ("always", {(0, 4), (1, 3)})]
)
def test_activations_that_gpipe_holds(mode: str, held: set[tuple[int, int]]) -> None:
    setting = Setting("gpipe", gpipe(2, 4), [2, 2, 2, 1], mode)
    assert [set(moments) for moments in setting.held] == [held, held]


Case = tuple[list[LayerCost], int, int, float]
cases = st.tuples(
    st.lists(layer_costs, min_size=2, max_size=6),
    st.integers(1, 3),  # Lanes.
    st.integers(1, 7),  # Batch.
    st.sampled_from([0.0, 3.0]),  # Seconds of a hand-off.
).filter(lambda case: len(case[0]) >= case[1])


@settings(deadline=None, max_examples=30)
@given(cases, st.data())
def test_predictions_and_their_bounds(case: Case, data: st.DataObject) -> None:
    costs, lanes, batch, hand_off = case
    setting = data.draw(st.sampled_from(settings_of(lanes, len(costs), batch, 4)))
    balance = data.draw(st.sampled_from(list(all_balances(len(costs), setting.program.stages))))
    forecast = Forecast(CostModel(costs, Affine(hand_off), SCALE), setting)
    edges = [0, *accumulate(balance)]
    makespan = simulate(setting.program, forecast.seconds(edges)).makespan
    assert makespan == pytest.approx(step(costs, hand_off, setting, balance))
    assert forecast.least_step <= makespan * (1 + 1e-9)
    assert forecast.least_seconds(balance) <= makespan * (1 + 1e-9)
    total: Counter[torch.device] = Counter()
    for stage, (begin, end) in enumerate(pairwise(edges)):
        total[DEVICES[setting.program.lane_of[stage]]] += forecast.stage_bytes(stage, begin, end)
    assert total == pytest.approx(peaks(costs, setting, balance, DEVICES))


@settings(deadline=None, max_examples=30)
@given(cases, st.booleans(), st.floats(0, 1))
def test_the_choice_is_the_best_of_all(case: Case, shared: bool, tightness: float) -> None:
    costs, lanes, batch, hand_off = case
    devices = [CPU] * lanes if shared else DEVICES[:lanes]
    model = CostModel(costs, Affine(hand_off), SCALE)
    possible = settings_of(lanes, len(costs), batch, 4)
    outcomes = [
        (step(costs, hand_off, s, b), max(peaks(costs, s, b, devices).values()))
        for s in possible
        for b in all_balances(len(costs), s.program.stages)
    ]
    plan = choose(model, devices, possible)
    assert plan.step_seconds == pytest.approx(min(seconds for seconds, _ in outcomes))

    least, most = min(p for _, p in outcomes), max(p for _, p in outcomes)
    limit = int(least + tightness * (most - least)) + 1
    plan = choose(model, devices, possible, limit)
    assert max(plan.peak_bytes.values()) <= limit
    assert plan.step_seconds == pytest.approx(min(s for s, peak in outcomes if peak <= limit))

    too_little = int(least) - 1
    with pytest.raises(ValueError, match=rf"smallest peak found is {int(least)} bytes"):
        choose(model, devices, possible, too_little)


def test_fixed_costs_and_hand_offs_make_fewer_chunks_faster() -> None:
    def chunks(fixed: float, hand_off: float) -> int:
        costs = [layer((fixed, 1.0), (2 * fixed, 2.0)) for _ in range(4)]
        model = CostModel(costs, Affine(hand_off), SCALE)
        return choose(model, [CPU, CPU], settings_of(2, 4, 32, 8)).chunks

    assert chunks(0.0, 0.0) == 8
    assert 1 < chunks(1.0, 0.0) < 8
    assert 1 < chunks(0.0, 3.0) < 8
    assert chunks(100.0, 0.0) == chunks(0.0, 1000.0) == 1


def test_hand_offs_cost_by_the_bytes_of_the_edge() -> None:
    """A cut where few bytes are handed on is worth an uneven balance."""
    costs = [layer(inputs=size) for size in (1, 100, 100, 1)]
    for per_byte, balance in ((0.0, [2, 2]), (1.0, [3, 1])):
        model = CostModel(costs, Affine(0.0, per_byte), SCALE)
        assert choose(model, [CPU] * 2, settings_of(2, 4, 8, 4)).balance == balance


def test_a_lower_memory_limit_costs_time() -> None:
    costs = [layer(kept=8, entry=1, trainable=10) for _ in range(4)]
    model = CostModel(costs, Affine(0.0), SCALE)
    possible = planner.possible_settings(2, 4, 16, 8, ["gpipe"])
    plans = [choose(model, DEVICES[:2], possible, limit) for limit in (None, 200, 120)]
    assert [plan.checkpoint for plan in plans] == ["never", "except_last", "except_last"]
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_settings_are_distinct_and_complete(name: str) -> None:
    found = planner.possible_settings(2, 4, 3, 9, [name])
    assert {len(s.rows) for s in found} == {1, 2, 3}
    assert {s.checkpoint for s in found} == set(MODES)
    assert len({(len(s.rows), s.recomputed) for s in found}) == len(found) == 2 + 3 + 3


def test_planning_a_module(clock: Clock) -> None:
    """Layers take 1 ms forward and 2 ms backward for any number of rows.

    With 2 equal stages, m chunks then take (m + 1) * 6 ms.
    """
    module = nn.Sequential(*(Work(clock, str(i), 1e-3, 2e-3) for i in range(4)))
    sample = torch.rand(8, 3)
    plan = plan_pipeline(
        module, sample, devices=["cpu", "cpu"], schedules=["gpipe"], timeout=0, max_chunks=3
    )
    assert plan.step_seconds == pytest.approx(12e-3)
    assert plan.chunks == 1 and plan.schedule == "gpipe" and plan.batch == 8
    assert {rows for _, rows in clock.log} == {8, 5, 3}
    text = str(plan)
    assert "predicted step: 12 ms, 50% of it bubble" in text
    assert "predicted peak memory" in text and "on cpu" in text
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_builds_the_pipe_that_it_describes(schedule: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))
    sample = torch.rand(6, 4)
    expected = module(sample)
    random_state = torch.get_rng_state()
    plan = pipekernels.plan_pipeline(
        module, sample, devices=["cpu"] * 2, memory_limit=2**20, timeout=0, schedules=[schedule]
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(plan, pipekernels.Plan)
    assert 0 < plan.step_seconds < float("inf") and 0 <= plan.bubble < 1
    assert 0 < plan.peak_bytes[CPU] <= 2**20 == plan.memory_limit
    assert "of 1 MiB allowed" in str(plan)
    pipe = plan.build(module)
    described = plan.balance, plan.chunks, plan.checkpoint
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == described
    torch.testing.assert_close(pipe(sample), expected)
    target = torch.zeros(6, 2)
    loss = pipe.train_step(sample, target, nn.functional.mse_loss, **plan.train_arguments)
    torch.testing.assert_close(loss, expected.square().mean())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("chunks", "balance"), [(1, [4, 6]), (3, [9, 1]), (8, [4, 6])])
def test_predicted_memory_is_an_upper_bound(mode: str, chunks: int, balance: list[int]) -> None:
    """The prediction is an upper bound.

    It exceeds the peak at most by memory that is used at another time: gradients of parameters, the
    stages' working memory, the output and its gradient, and the tensor that both stages count.
    """
    width, batch = 64, 96
    blocks = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    module = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Tanh())
    x = torch.rand(batch, width)
    rows = [batch // chunks, batch]
    costs = planner.measure_costs(module, x, CPU, rows, timeout=0)
    setting = Setting("gpipe", gpipe(2, chunks), micro_batch_sizes(batch, chunks), mode)
    edges = list(pairwise([0, balance[0], sum(balance)]))
    forecast = Forecast(CostModel(costs, Affine(0.0), SCALE), setting)
    predicted = sum(forecast.stage_bytes(s, *edge) for s, edge in enumerate(edges))

    pipe = Pipe(
        module, balance, devices=["cpu"] * 2, chunks=chunks, checkpoint=mode,
        execution="inline",  # LiveStorages watches this thread only.
    )  # fmt: skip
    pipe(x).sum().backward()
    pipe.zero_grad()
    parameters = sum(p.nbytes for p in pipe.parameters())
    live = LiveStorages([x, *pipe.parameters()])
    with live:
        pipe(x).sum().backward()
    real = live.peak + parameters + x.nbytes
    working = sum(max(c.working(rows[0]) for c in costs[a:b]) for a, b in edges)
    assert real <= predicted <= real + parameters + working + 3 * x.nbytes


def test_by_default_a_lane_per_intra_op_thread() -> None:
    torch.set_num_threads(2)
    plan = plan_pipeline(nn.Sequential(*(nn.Tanh() for _ in range(3))), torch.rand(4), timeout=0)
    assert torch.get_num_threads() == 2
    if not torch.cuda.is_available():
        assert [stage.device for stage in plan.stages] == [CPU] * 2


INTERLEAVED = {"schedules": ["interleaved"], "devices": ["cpu"] * 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"module": nn.Linear(2, 2)}, TypeError, "nn.Sequential, not Linear"),
        ({"sample": 3}, TypeError, "the sample must be .* not int"),
        ({"sample": torch.rand(())}, ValueError, "sample tensor 0 has no dimension"),
        ({"sample": torch.rand(0, 2)}, ValueError, "the sample has no rows"),
        ({"max_chunks": 0}, ValueError, "max_chunks is 0; it must be an integer of at least 1"),
        ({"max_chunks": 2.5}, ValueError, "max_chunks is 2.5"),
        ({"param_scale": -1.0}, ValueError, "param_scale is -1.0"),
        ({"schedules": ["fifo"]}, ValueError, "'fifo'; it must be one of gpipe"),
        ({"schedules": []}, ValueError, "no schedule"),
        ({"schedules": "gpipe"}, TypeError, "schedules is 'gpipe'; give a list"),
        (INTERLEAVED, ValueError, "2 layers on 2 lanes.*'interleaved' needs 2 layers per lane"),
        ({"devices": "cpu"}, TypeError, r"devices is 'cpu'; give a list, such as \['cpu'\]"),
        ({"devices": []}, ValueError, "0 devices for 2 layers"),
        ({"devices": ["cpu"] * 3}, ValueError, "3 devices for 2 layers.*one per layer"),
        ({"module": nn.Sequential()}, ValueError, "1 devices for 0 layers"),
        ({"memory_limit": 0}, ValueError, "memory_limit is 0; it must be a positive number"),
        ({"memory_limit": float("nan")}, ValueError, "memory_limit is nan"),
        ({"memory_limit": "2 GiB"}, ValueError, "memory_limit is '2 GiB'"),
        ({"timeout": -1.0}, ValueError, "timeout is -1.0"),
        ({"memory_limit": 10}, ValueError, r"fits into 10 bytes .* smallest peak found is \d+"),
    ],
)
def test_errors(change: dict[str, object], error: type[Exception], message: str) -> None:
    module, sample = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.rand(2, 2)
    arguments = {"module": module, "sample": sample, "devices": ["cpu"], "timeout": 0.0}
    with pytest.raises(error, match=message):
        plan_pipeline(**arguments | change)
