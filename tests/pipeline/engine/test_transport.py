"""Pipes across devices: no tensor is read before it is complete, or overwritten while it is read.

The CUDA devices are fakes (``support/cuda/recorded_streams.py``), except in one test.
"""

import copy
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.cuda.recorded_streams import machine
from support.function_layer import FunctionLayer
from support.skip_layers import Pop, Stash
from torch import nn

from pipekernels import NoChunk, Pipe, move_to_device
from pipekernels.device import channel
from pipekernels.ops import p2p_copy
from pipekernels.pipeline.context import MODES
from pipekernels.pipeline.schedule import SCHEDULES
from pipekernels.skip import Namespace

CPU, GPU, OTHER = "cpu", "cuda:0", "cuda:1"
NAMES = {"c": CPU, "0": GPU, "1": OTHER, "2": "cuda:2", "3": "cuda:3"}
PLACEMENTS = [
    [NAMES[letter] for letter in letters]
    for letters in ["0", "00", "01", "c0", "0c", "012", "0c0", "c0c", "001", "0123", "0101", "0c11"]
]
WIDTH = 3


def late(x: torch.Tensor) -> torch.Tensor:
    """On a GPU, delays its result by one or two milliseconds."""
    if x.is_cuda:
        torch.cuda._sleep(2_000_000)
    return x + 0


def in_place(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes to its input, and also returns integers, which are always on the CPU."""
    index = torch.arange(len(x))
    return x.mul_(1.5), index


def model(stages: int) -> tuple[nn.Sequential, list[int]]:
    torch.manual_seed(stages)
    skip = Namespace()
    layers: list[nn.Module] = [Stash().isolate(skip)]
    balance = []
    for stage in range(stages):
        before = len(layers) if stage else 0
        layers += [FunctionLayer(late), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        layers += [nn.Linear(WIDTH, WIDTH), FunctionLayer(in_place)]
        if stage < stages - 1:  # The stage returns a pair.
            balance.append(len(layers) - before)
        layers.append(FunctionLayer(lambda pair: pair[0].tanh()))
    layers.append(Pop().isolate(skip))
    balance.append(len(layers) - sum(balance))
    return nn.Sequential(*layers).double(), balance


@torch.no_grad()
def descend(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None


def run(
    devices: Sequence[Any],
    chunks: int,
    checkpoint: Any,
    schedule: Any,
    home: str,
    machine: Any,
) -> None:
    """Compare two training steps, with inputs on ``home``, with those of the plain model."""
    plain, balance = model(len(devices))
    piped = copy.deepcopy(plain)
    x, y = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    loss_fn = nn.functional.mse_loss
    with machine as made:
        at, to = p2p_copy(x, home).clone(), p2p_copy(y, devices[-1])
        pipe = Pipe(piped, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
        made.placing = False
        ours = []
        for _ in range(2):
            given = at.detach().clone().requires_grad_()
            if schedule is None:
                loss = loss_fn(pipe(given), to)
                torch.autograd.backward(loss)
            else:
                lanes = max(n for n in (3, 2, 1) if len(devices) % n == 0)
                options: Any = {"lanes": lanes} if schedule == "interleaved" else {}
                loss = pipe.train_step(given, to, loss_fn, schedule=schedule, **options)
            assert given.grad is not None
            ours.append((loss.detach() * 1, given.grad * 1))
            descend(pipe)
            at.mul_(1.25)  # The caller may overwrite the pipe's input now.
            del given, loss
        made.poll()
    for i in range(2):
        given = (x * 1.25**i).requires_grad_()
        loss = loss_fn(plain(given), y)
        loss.backward()
        found = [tensor.cpu() for tensor in ours[i]]
        torch.testing.assert_close(found, [loss.detach(), given.grad], rtol=0, atol=1e-10)
        descend(plain)
    found = [parameter.detach().cpu() for parameter in piped.parameters()]
    torch.testing.assert_close(found, list(plain.parameters()), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "checkpoint"), [(None, "except_last"), ("zb-h1", "never")])
@pytest.mark.parametrize("devices", PLACEMENTS, ids=" ".join)
def test_placements(devices: list[str], schedule: Any, checkpoint: Any) -> None:
    run(devices, 4, checkpoint, schedule, CPU, machine())


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_layers_run_on_the_current_device(schedule: Any) -> None:
    seen = []
    with machine() as made:

        def layer(x: torch.Tensor) -> torch.Tensor:
            seen.append((x.device, made.device))
            return x.sin()

        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(layer)) for _ in range(4)]
        places = [OTHER, GPU, CPU, GPU]
        pipe = Pipe(nn.Sequential(*layers), [1] * 4, devices=places, chunks=3, checkpoint="always")
        made.placing = False
        x = p2p_copy(torch.ones(6, WIDTH), OTHER)
        if schedule is None:
            pipe(x).sum().backward()
        else:
            pipe.train_step(x, None, torch.sum, schedule=schedule, loss_reduction="sum")
        assert made.device == torch.device(GPU)
    assert len(seen) == 4 * 3 * 2  # Stages, microbatches, forwards and recomputations.
    assert all(of == current for of, current in seen if of.type == "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_schedules(schedule: Any, checkpoint: Any) -> None:
    run([GPU, CPU, OTHER, OTHER], 7, checkpoint, schedule, OTHER, machine())


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_schedules_without_peer_access(schedule: Any) -> None:
    run([GPU, OTHER, GPU, OTHER], 5, "always", schedule, GPU, machine(peers=False))


@pytest.mark.parametrize(
    ("home", "peers"), [(CPU, True), (GPU, True), (OTHER, True), (OTHER, False)]
)
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_numbers_of_micro_batches(chunks: int, home: str, peers: bool) -> None:
    run([GPU, GPU, OTHER], chunks, "except_last", "1f1b", home, machine(peers=peers))


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize(
    "devices",
    [[GPU, GPU], [CPU, GPU], [GPU, CPU], [GPU, CPU, GPU], [GPU, OTHER], [GPU, OTHER, GPU, OTHER]],
    ids=" ".join,
)
def test_real_devices(devices: list[str], schedule: Any, device: torch.device) -> None:
    """The same on the machine's devices; results on GPUs are delayed."""
    if device.type == "cpu":
        devices = [CPU] * len(devices)
    elif OTHER in devices and torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device, and this needs two")
    for checkpoint, home in zip(MODES, (CPU, devices[0], devices[-1]), strict=True):
        run(devices, 4, checkpoint, schedule, home, nullcontext(Mock()))


def test_copies_overlap_computation_on_both_devices() -> None:
    """Copies run at the same time as computation on both devices, and the thread does not wait.

    A copy does not wait for the target's work on earlier microbatches, and the source's work on
    the next microbatch does not wait for the copy.
    """
    chunks = 6
    first, last = torch.device(GPU), torch.device(OTHER)
    with machine() as made, torch.no_grad():
        layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
        pipe = Pipe(nn.Sequential(*layers), [1, 1], devices=[GPU, OTHER], chunks=chunks)
        given = p2p_copy(torch.randn(chunks, WIDTH, dtype=torch.float64), GPU)
        made.placing = False
        made.copies.clear()
        made.host_waits = 0
        begins: dict[tuple[int, int], dict[Any, int]] = {}
        ends: dict[tuple[int, int], int] = {}

        def begin(stage: int, device: torch.device) -> None:
            begins[stage, sum(s == stage for s, _ in begins)] = dict(made.current(device).clock)

        def end(stage: int, device: torch.device) -> None:
            ends[stage, sum(s == stage for s, _ in ends)] = made.current(device).clock[
                made.current(device)
            ]

        for stage, device in enumerate((first, last)):
            layers[stage].register_forward_pre_hook(lambda *_, s=stage, d=device: begin(s, d))
            layers[stage].register_forward_hook(lambda *_, s=stage, d=device: end(s, d))
        pipe(given)
    assert made.host_waits == 0
    copies = [c for c in made.copies if (c.source, c.target) == (first, last)]
    assert len(copies) == chunks
    here, there = made.default(first), made.default(last)
    for m, sent in enumerate(copies):
        assert sent.agent not in (here, there)
        assert sent.after.get(here, 0) >= ends[0, m]
        if m > 0:
            assert sent.after.get(there, 0) < ends[1, m - 1]
        if m < chunks - 1:
            assert begins[0, m + 1].get(sent.agent, 0) < sent.time


@pytest.mark.parametrize("devices", [[GPU, GPU], [GPU, OTHER], [GPU, CPU, OTHER]], ids=" ".join)
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_caller_with_streams_of_its_own(devices: list[str], checkpoint: Any) -> None:
    """The forward and the backward are called with different current streams."""
    module, balance = model(len(devices))
    with machine() as made:
        pipe = Pipe(module, balance, devices=devices, chunks=3, checkpoint=checkpoint)
        made.placing = False
        given = p2p_copy(torch.randn(9, WIDTH, dtype=torch.float64), GPU).requires_grad_()
        places = [torch.device(d) for d in dict.fromkeys(devices) if d != CPU]
        mine = [made.new(place) for place in places]
        for stream, place in zip(mine, places, strict=True):
            stream.wait_event(made.default(place).record_event())
        with made.using(mine[0]), made.using(mine[-1]):
            output = pipe(given)
            grad = torch.ones_like(output)
        torch.autograd.backward(output, grad)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.sub_(parameter.grad)
            given -= given.grad
        # The caller must order these streams: gradients were computed on the default streams.
        for stream, place in zip(mine, places, strict=True):
            stream.wait_event(made.default(place).record_event())
        del output, grad, given
        pipe.zero_grad()
        made.poll()


def test_channels_keep_no_tensors_of_a_dropped_pipe() -> None:
    with machine() as made:
        module, balance = model(2)
        pipe = Pipe(module, balance, devices=[GPU, OTHER], chunks=3, checkpoint="never")
        made.placing = False
        output = pipe(p2p_copy(torch.randn(9, WIDTH, dtype=torch.float64), GPU))
        channels = list(channel._channels.values())
        assert any(each._received for each in channels)
        engine = weakref.ref(pipe._engine)
        del pipe, output
        assert engine() is None
        assert not any(each._received or each._unused or each._sources for each in channels)
        assert not any(each._pending_host_copies for each in channels)


def test_the_thread_waits_only_for_moves_to_the_cpu() -> None:
    with machine() as made:
        x = torch.randn(2, WIDTH)
        there = move_to_device(x, GPU)
        x.zero_()
        further = move_to_device({"x": there}, OTHER)
        there.zero_()
        assert made.host_waits == 0
        back = move_to_device(further, CPU)
        assert made.host_waits == 1 and back["x"].device == torch.device(CPU)
        assert back["x"].abs().sum() > 0
        assert move_to_device(there, "meta").device == torch.device("meta")


def test_unsplit_tensors_are_moved_too() -> None:
    masked = FunctionLayer(lambda x, mask: x * mask)
    with machine() as made, torch.no_grad():
        pipe = Pipe(nn.Sequential(masked, nn.Tanh()), [1, 1], devices=[GPU, OTHER], chunks=2)
        made.placing = False
        output = pipe(torch.ones(4, 2), NoChunk(torch.tensor([0.0, 1.0])))
        assert torch.equal(p2p_copy(output, CPU), torch.tensor([[0.0, 1.0]]).tanh().expand(4, 2))


def test_evaluation_before_training() -> None:
    """Buffers that a channel keeps must not be inference tensors."""
    layer = nn.Linear(WIDTH, WIDTH).double()
    x = torch.randn(40, WIDTH, dtype=torch.float64)
    expected = torch.cat([layer(part).detach() for part in x.chunk(2)])
    with machine(peers=False) as made:
        pipe = Pipe(nn.Sequential(layer, nn.Identity()), [1, 1], devices=[GPU, OTHER], chunks=2)
        made.placing = False
        with torch.inference_mode():
            evaluated = p2p_copy(pipe(x), CPU)
        torch.autograd.backward(pipe(x).sum())
    assert torch.equal(evaluated, expected)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_backward_during_another(checkpoint: Any) -> None:
    """Autograd's thread may begin another backward while one waits for another device."""
    between: list[Any] = []

    def pausing(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: between.pop()() if between else None)
        return y

    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), FunctionLayer(pausing), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    plain = nn.Sequential(*layers).double()
    piped = copy.deepcopy(plain)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    expected = [
        torch.autograd.grad(plain(part).square().sum(), list(plain.parameters())) for part in x
    ]
    inner: list[Any] = []
    with machine() as made:
        pipe = Pipe(piped, [2, 2], devices=[GPU, OTHER], chunks=3, checkpoint=checkpoint)
        made.placing = False
        parameters = list(pipe.parameters())
        losses = [pipe(part).square().sum() for part in p2p_copy(list(x), GPU)]

        def begin_the_other() -> None:
            inner.extend(torch.autograd.grad(losses[1], parameters))

        between.append(begin_the_other)
        outer = torch.autograd.grad(losses[0], parameters)
        made.poll()
    for grads, others in ((outer, expected[0]), (inner, expected[1])):
        torch.testing.assert_close(grads, others, rtol=0, atol=1e-10)
    assert all(p is q for p, q in zip(pipe.parameters(), piped.parameters(), strict=True))
    assert len(parameters) == 4


@pytest.mark.parametrize("devices", [[GPU], [GPU, OTHER]], ids=" ".join)
def test_pinned_inputs_may_be_overwritten_afterwards(devices: list[str]) -> None:
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in devices]).double()
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    expected = module(x).detach()
    with machine() as made, torch.no_grad():
        pipe = Pipe(module, [1] * len(devices), devices=devices, chunks=4)
        made.placing = False
        pinned = channel.pinned_like(x)
        pinned.copy_(x)
        output = pipe(pinned)
        pinned.zero_()
        torch.testing.assert_close(p2p_copy(output, CPU), expected, rtol=0, atol=1e-10)
        assert not any(each._native.slots for each in channel._channels.values())
