"""Slots: when the memory of CUDA graphs may be used, and what isolates it."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import test_graphs
import torch
from support.cuda.graph_cases import (
    CAPTURED,
    STEPS,
    assert_equal,
    data,
    model,
    pipe_of,
    slots,
    train,
)
from support.cuda.recorded_graphs import Record, recorded
from support.cuda.recorded_streams import Race, machine
from torch import nn
from torch.nn import functional as F

from pipekernels import Pipe
from pipekernels.device import graphs as ops_graphs
from pipekernels.ops import p2p_copy
from pipekernels.pipeline.cuda_graphs import checks as graph_checks
from pipekernels.pipeline.cuda_graphs import slots as graph_slots
from pipekernels.pipeline.cuda_graphs import stage_graphs as graphs
from pipekernels.pipeline.schedule.program import SCHEDULES
from pipekernels.pipeline.stage.checkpoint import MODES

pytestmark = pytest.mark.full

# ---- when graphs and their memory may be used ----


def test_parameters_must_not_change_before_the_backward(
    device: torch.device, record: Record
) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    x.requires_grad_()
    loss = pipe(x).sum()
    with torch.no_grad():
        pipe[-1].bias += 1
    with pytest.raises(RuntimeError, match="parameters of stage 3 were modified in place"):
        loss.backward()
    loss = pipe(x).sum()
    for parameter in pipe.parameters():
        # The graphs use the former memory.
        parameter.data = parameter.data.clone().fill_(float("nan"))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in pipe.parameters())


def test_a_pass_without_a_turn_runs_without_graphs(device: torch.device, record: Record) -> None:
    """Forwards, and backwards of replayed forwards."""
    module, balance = model(device)
    other = pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=False)
    pipe = pipe_of(module, balance, device)
    x, _ = data(device)
    recorder = pipe._engine.stages.graphs[0].recorder
    for _ in range(STEPS):
        record.spoil()
        for of in (pipe, other):
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter *= 0.9
            loss = of(x).square().sum()
            with recorder.turn():
                loss.backward()
        before = slots(pipe)
        with recorder.turn():
            assert_equal([pipe(x)], [other(x)])
        assert slots(pipe) == before
    assert_equal([p.grad for p in pipe.parameters()], [p.grad for p in other.parameters()])
    assert min(slots(pipe)) >= 3


def test_two_captures_at_a_time(device: torch.device, record: Record) -> None:
    """During a capture, another pipe captures nothing; it captures in a later mini-batch."""
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    with ops_graphs._one_at_a_time.one():
        train(pipe, x, y, record)
        assert slots(pipe) == [0] * 4
    train(pipe, x, y, record)
    assert min(slots(pipe)) >= 2


@pytest.mark.slow
def test_a_backward_without_a_turn_waits_for_a_capture(
    device: torch.device, record: Record
) -> None:
    """Otherwise autograd would run it on the stream that is being captured."""
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    loss = pipe(x).square().sum()
    recorder = pipe._engine.stages.graphs[0].recorder
    cell = torch.zeros((), device=device)
    begun, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        cell.add_(1)
        begun.set()
        may_end.wait(60)
        ended.append("capture")

    def capture() -> None:
        with recorder.turn():
            recorder.capture(work, ops_graphs.new_pool())

    def differentiate() -> None:
        loss.backward()
        ended.append("backward")

    capturing, differentiating = (threading.Thread(target=f) for f in (capture, differentiate))
    capturing.start()
    assert begun.wait(60)
    differentiating.start()
    differentiating.join(1.0)
    may_end.set()
    for thread in (capturing, differentiating):
        thread.join(60)
    assert ended == ["capture", "backward"]


def test_threads_take_turns(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipes = [pipe_of(copy.deepcopy(module), balance, device) for _ in range(2)]
    x, y = data(device)
    expected = train(pipe_of(module, balance, device, cuda_graphs=False), x, y)
    results: list[Any] = [None, None]

    def work(i: int) -> None:
        results[i] = train(pipes[i], x, y)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        assert_equal(result, expected)


def test_limits_of_slots_and_signatures(
    device: torch.device, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LIMIT", 4)
    module, balance = model(device)
    other = pipe_of(copy.deepcopy(module), balance, device, chunks=8, cuda_graphs=False)
    pipe = pipe_of(module, balance, device, chunks=8)
    x, y = data(device)
    with pytest.warns(RuntimeWarning, match="more than 4 micro-batches"):
        ours = train(pipe, x, y, record)
    assert_equal(ours, train(other, x, y))
    assert slots(pipe) == [4] * 4

    @torch.no_grad()
    def evaluate(of: Pipe, rows: int) -> torch.Tensor:
        return of(data(device, rows)[0])

    for rows in (16, 24, 32):
        torch.testing.assert_close(evaluate(pipe, rows), evaluate(other, rows))
    with pytest.warns(RuntimeWarning, match="4 different kinds of inputs"):
        ours = evaluate(pipe, 40)
    torch.testing.assert_close(ours, evaluate(other, 40))
    pipe = pipe_of(nn.Sequential(nn.Dropout(0.1), nn.Tanh()), [1, 1], device)
    for i in range(4):
        pipe[0].p = 0.1 * i
        pipe(x)
    pipe[0].p = 0.5
    with pytest.warns(RuntimeWarning) as caught:
        pipe(x)
    messages = sorted(str(warning.message).partition(": ")[2] for warning in caught)
    assert messages == [
        "its layers have had 4 different settings",
        "its layers' tensors or attributes are others in every mini-batch",
    ]
    assert len(pipe._engine.stages.graphs[0]._settings) == 4


@torch.no_grad()
@pytest.mark.filterwarnings("error:stage")
def test_dropped_slots_do_not_count_towards_the_limit(
    device: torch.device, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LIMIT", 2)
    module, balance = model(device)
    pipe = pipe_of(module, balance, device, chunks=1)
    x, _ = data(device)
    for _ in range(3):
        for parameter in pipe.parameters():
            parameter.data = parameter.data.clone()
        for _ in range(CAPTURED):
            pipe(x)
        assert slots(pipe) == [1] * 4


def test_copies_have_separate_graphs(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert twin.cuda_graphs and slots(twin) == [0] * 4
        before = [p.detach().clone() for p in pipe.parameters()]
        train(twin, x, y, record)
        assert min(slots(twin)) >= 2
        assert_equal([p.detach() for p in pipe.parameters()], before)


def references_to_slots(pipe: Pipe) -> list[weakref.ref]:
    """Weak references to all slots, of which there must be some."""
    found = [
        weakref.ref(slot) for stage in pipe._engine.stages.graphs.values() for slot in stage.slots()
    ]
    assert found
    return found


def test_a_dropped_pipe_frees_its_slots(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    kept = references_to_slots(pipe)
    output = pipe(x)
    del pipe
    assert any(slot() is not None for slot in kept), "the output's graph"
    del output
    assert all(slot() is None for slot in kept)


def test_replaced_parameters_free_the_slots(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    kept = references_to_slots(pipe)
    pipe.to(torch.float32)
    pipe(x.float())
    assert all(slot() is None for slot in kept)


def test_on_the_cpu_nothing_is_captured() -> None:
    module, balance = model(torch.device("cpu"))
    pipe = pipe_of(module, balance, torch.device("cpu"))
    assert pipe.cuda_graphs and not pipe._engine.stages.graphs
    x, y = data(torch.device("cpu"))
    train(pipe, x, y)


# ---- what isolates memory ----

CPU, GPU, OTHER = "cpu", "cuda:0", "cuda:1"


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables watches: they would see the CPU tensors behind the fake devices."""
    watch = graph_checks._Watch(torch.device(CPU))
    monkeypatch.setattr(graphs, "watched", lambda stage, device: nullcontext(watch))


def steps_in_machine(devices: list[str], schedule: str | None, checkpoint: str) -> None:
    """Train with current streams that change from step to step; there must be no race."""
    module, balance = model(torch.device(CPU))
    plain = pipe_of(copy.deepcopy(module), balance, torch.device(CPU), cuda_graphs=False)
    x, y = data(torch.device(CPU))
    results = []
    with machine() as made, recorded(made) as record:
        pipe = Pipe(
            module, balance, devices=devices, chunks=3, checkpoint=checkpoint, cuda_graphs=True
        )
        here, there = p2p_copy(x, devices[0]), p2p_copy(y, devices[-1])
        made.placing = False
        places = [torch.device(d) for d in dict.fromkeys(devices) if d != CPU]
        for _ in range(STEPS):
            given = here.clone().requires_grad_()
            streams = [made.new(place) for place in places]
            for stream, place in zip(streams, places, strict=True):
                stream.wait_event(made.default(place).record_event())
            with made.using(streams[0]), made.using(streams[-1]):
                if schedule is None:
                    output = pipe(given)
                    loss = F.mse_loss(output, there)
                    torch.autograd.backward(loss)
                    del output
                else:
                    lanes = {"lanes": 2} if schedule == "interleaved" else {}
                    loss = pipe.train_step(given, there, F.mse_loss, schedule=schedule, **lanes)
            for stream, place in zip(streams, places, strict=True):
                made.default(place).wait_event(stream.record_event())
            results += [loss.detach() * 1, given.grad * 1]
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter -= 0.1 * parameter.grad
            # The caller must order these streams: gradients were computed on the default streams.
            for stream, place in zip(streams, places, strict=True):
                stream.wait_event(made.default(place).record_event())
            pipe.zero_grad()
            del given, loss
            made.poll()
        assert record.replays > 0
        made.synchronize()
        del pipe
        made.poll()
    for step in range(STEPS):
        given = x.clone().requires_grad_()
        loss = F.mse_loss(plain(given), y)
        loss.backward()
        assert given.grad is not None
        assert_equal(results[2 * step : 2 * step + 2], [loss.detach(), given.grad])
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.filterwarnings("error:stage")
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_every_schedule_is_ordered(schedule: str | None, unwatched: None) -> None:
    steps_in_machine([GPU, CPU, OTHER, GPU], schedule, "except_last")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:stage")
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(
    "devices", [[GPU] * 4, [GPU, GPU, OTHER, OTHER], [GPU, CPU, OTHER, GPU]], ids=" ".join
)
def test_every_placement_is_ordered(devices: list[str], checkpoint: str, unwatched: None) -> None:
    steps_in_machine(devices, "1f1b", checkpoint)


@contextmanager
def turn_without_waiting(self: ops_graphs.Recorder) -> Iterator[bool]:
    yield True


def capture_without_waiting(self: ops_graphs.Recorder, work: Any, pool: Any) -> Any:
    return ops_graphs._record(work, self._stream, pool)


@pytest.mark.filterwarnings("error:stage")
@pytest.mark.parametrize(
    ("name", "broken"),
    [("turn", turn_without_waiting), ("capture", capture_without_waiting)],
    ids=["turns", "captures"],
)
def test_waiting_for_turns_and_captures_is_needed(
    name: str, broken: Any, unwatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops_graphs.Recorder, name, broken)
    with pytest.raises(Race):
        run_on_two_streams(torch.device(GPU))


@pytest.mark.filterwarnings("error:stage")
def test_two_streams(unwatched: None) -> None:
    run_on_two_streams(torch.device(GPU))


def run_on_two_streams(place: torch.device) -> None:
    """Call one pipe on two streams in turn, neither of which waits for the other."""
    module, balance = model(torch.device(CPU))
    with machine() as made, recorded(made) as record, torch.no_grad():
        pipe = Pipe(module, balance, devices=[GPU] * 4, chunks=2, cuda_graphs=True)
        x = p2p_copy(data(torch.device(CPU))[0], GPU)
        made.placing = False
        others = [made.new(place), made.new(place)]
        for stream in others:
            stream.wait_event(made.default(place).record_event())
        for stream in others * STEPS:
            with made.using(stream):
                pipe(x)
        assert record.replays
        made.synchronize()


def lease_without_reference(lease: Any, slot: Any) -> None:
    lease.slot = slot


def accumulate_without_copying(task: Any, grads: Any) -> None:
    for alias, grad in zip(task._aliases, grads, strict=True):
        if grad is not None:
            alias.grad = grad if alias.grad is None else alias.grad.add_(grad)


def write_and_count_versions(memory: Any, values: Any) -> None:
    with torch.no_grad():
        for place, value in zip(memory, values, strict=True):
            place.copy_(value)


class SharedVersions(graphs.StageParameters):
    def __init__(self, module: nn.Module, *, own_versions: bool) -> None:
        super().__init__(module)


def all_cases() -> None:
    device = torch.device(CPU)
    with recorded() as record:
        test_graphs.test_equals_the_unwrapped_model("1f1b", "never", device, record)
    with recorded() as record:
        test_a_pass_without_a_turn_runs_without_graphs(device, record)
    with recorded() as record:
        test_parameters_must_not_change_before_the_backward(device, record)


def test_slots_isolate_memory() -> None:
    all_cases()


@pytest.mark.parametrize(
    ("owners", "name", "broken"),
    [
        ([graphs, graph_slots], "copies_of", tuple),
        ([graphs.GraphedTask], "_accumulate", accumulate_without_copying),
        ([graphs], "write", write_and_count_versions),
        ([graphs], "StageParameters", SharedVersions),
        ([graph_slots.Lease], "__init__", lease_without_reference),
        ([ops_graphs], "new_pool", lambda: 0),
    ],
    ids=["copies", "gradients", "writes", "versions", "leases", "pools"],
)
def test_every_isolation_of_a_slot_is_needed(
    owners: list[Any], name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in owners:
        monkeypatch.setattr(owner, name, broken)
    with warnings.catch_warnings(), pytest.raises((AssertionError, RuntimeError)):
        warnings.simplefilter("ignore")
        all_cases()
