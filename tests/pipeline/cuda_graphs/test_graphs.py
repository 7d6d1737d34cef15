"""``Pipe(cuda_graphs=True)``: the same results as without graphs, in captures and replays.

On the CPU, graphs are fakes (``support/cuda/recorded_graphs.py``); their memory is spoilt whenever
nothing may depend on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from support.cuda.graph_cases import (
    CAPTURED,
    STEPS,
    WIDTH,
    assert_equal,
    data,
    model,
    pipe_of,
    slots,
    train,
)
from support.cuda.recorded_graphs import Record
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.schedule.program import SCHEDULES
from pipekernels.pipeline.stage.checkpoint import MODES
from pipekernels.pipeline.stage.context import default_device
from pipekernels.skip import pop, skippable, stash

pytestmark = pytest.mark.full

# ---- results and captures ----


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.filterwarnings("error:stage")
def test_equals_the_unwrapped_model(
    schedule: str | None, checkpoint: str, device: torch.device, record: Record
) -> None:
    """Micro-batches have two sizes, and several are in flight.

    The plain model gets micro-batches, too, as its results depend on a row's index in them.
    """
    module, balance = model(device)
    plain = copy.deepcopy(module)
    x, y = data(device)
    pipe = pipe_of(module, balance, device, checkpoint=checkpoint)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x):
            return torch.cat([self.plain(part) for part in x.tensor_split(3)])

    ours = train(pipe, x, y, record, schedule)
    assert min(slots(pipe)) >= 2
    assert_equal(ours, train(Loop(), x, y))
    before = record.replays
    with torch.no_grad():
        for _ in range(STEPS):
            torch.testing.assert_close(pipe(x), Loop()(x), rtol=1e-10, atol=1e-10)
    assert device.type == "cuda" or record.replays > before


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_random_numbers_are_those_without_graphs(
    chunks: int, checkpoint: str, device: torch.device, record: Record
) -> None:
    module, balance = model(device, dropout=0.4)
    options = {"chunks": chunks, "checkpoint": checkpoint}
    other = pipe_of(copy.deepcopy(module), balance, device, **options, cuda_graphs=False)
    pipe = pipe_of(module, balance, device, **options)
    x, y = data(device)
    results = [
        [*train(of, x, y), torch.rand(2, device=device), torch.rand(2)] for of in (pipe, other)
    ]
    assert min(slots(pipe)) >= 1
    assert_equal(*results)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_running_statistics(checkpoint: str, device: torch.device, record: Record) -> None:
    """Warm-ups and captures must not update them."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).to(
        device=device, dtype=torch.float64
    )
    other = pipe_of(copy.deepcopy(module), [2, 1], device, checkpoint=checkpoint, cuda_graphs=False)
    pipe = pipe_of(module, [2, 1], device, checkpoint=checkpoint)
    x, y = data(device)
    assert_equal(train(pipe, x, y, record), train(other, x, y))
    assert min(slots(pipe)) >= 1
    assert_equal(list(pipe.buffers()), list(other.buffers()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_layers_that_change_their_buffers(
    checkpoint: str, device: torch.device, record: Record
) -> None:
    """Replays do not increment the version counters of buffers."""
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    other = pipe_of(copy.deepcopy(module), [2, 1], device, checkpoint="never", cuda_graphs=False)
    pipe = pipe_of(module, [2, 1], device, checkpoint=checkpoint)
    x, y = data(device)
    assert_equal(train(pipe, x, y, record), train(other, x, y))
    assert min(slots(pipe)) >= 1
    assert_equal(list(pipe.buffers()), list(other.buffers()))


def test_captures_are_in_the_third_step(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device, chunks=1)
    x, y = data(device)
    for step in range(1, STEPS):
        train(pipe, x, y, record, steps=1)
        assert slots(pipe) == [int(step >= CAPTURED)] * 4
    train(pipe, x, y, record, "gpipe")
    assert slots(pipe) == [1] * 4, "train_step uses the graphs of forward and backward"


def test_one_loss_of_several_forwards_and_a_second_backward(
    device: torch.device, record: Record
) -> None:
    module, balance = model(device)
    other = pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=False)
    pipe = pipe_of(module, balance, device)
    x, _ = data(device)

    def grads(of: Pipe) -> list[torch.Tensor]:
        loss = of(x).square().sum() + 2 * of(x.sin()).sum() + of(x[:1]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found = [p.grad for p in of.parameters()]
        of.zero_grad()
        return found

    for _ in range(STEPS):
        record.spoil()
        assert_equal(grads(pipe), grads(other))
    # Two inputs of three micro-batches were in flight at once, and one of one micro-batch.
    assert slots(pipe) == [7] * 4


def test_backwards_of_some_outputs(device: torch.device, record: Record) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Two()).to(device=device, dtype=torch.float64)
    plain = copy.deepcopy(module)
    pipe = pipe_of(module, [1, 1], device)
    x, _ = data(device)
    both = slice(2)
    for which in (both, both, both, both, 1, both, 0, 1):
        found = [of(x)[which] for of in (pipe, plain)]
        ours, others = (
            torch.autograd.grad(
                sum(part.square().sum() for part in (out if isinstance(out, tuple) else [out])),
                list(of.parameters()),
                allow_unused=True,
            )
            for out, of in zip(found, (pipe, plain), strict=True)
        )
        assert [g is None for g in ours] == [g is None for g in others]
        assert_equal([g for g in ours if g is not None], [g for g in others if g is not None])
    assert min(slots(pipe)) >= 3 and all(p.grad is None for p in pipe.parameters())


def test_gradients_accumulate_over_steps(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    other = pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=False)
    pipe = pipe_of(module, balance, device)
    x, _ = data(device)
    for step in range(2 * STEPS):
        for of in (pipe, other):
            of(x * step).square().sum().backward()
        record.spoil()
    assert_equal([p.grad for p in pipe.parameters()], [p.grad for p in other.parameters()])


# ---- changes from step to step ----


def shorter(pipe: Pipe, x: torch.Tensor) -> Any:
    return nullcontext(), x[:5]


def evaluated(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe.eval()
    return nullcontext(), x


def moved(pipe: Pipe, x: torch.Tensor) -> Any:
    for parameter in pipe.parameters():
        parameter.data = parameter.data * 2
    return nullcontext(), x


def cast(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe.to(torch.float32)
    return nullcontext(), x.float()


def frozen(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe[2].weight.requires_grad_(False)
    return nullcontext(), x


def less_dropout(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe[5].p = 0.9
    return nullcontext(), x


class Sine(nn.ReLU):
    """Has the same attributes as the layer that it replaces."""

    def forward(self, x):
        return x.sin_()


def other_layer(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe.partitions[2][0] = Sine(inplace=True)
    return nullcontext(), x


def other_buffer(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe[-1].scale = pipe[-1].scale * 2
    return nullcontext(), x


def other_attribute(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe[-1].shift = pipe[-1].shift * 2
    return nullcontext(), x


def other_sizes(pipe: Pipe, x: torch.Tensor) -> Any:
    pipe[-1].turns = (2,)
    return nullcontext(), x


def autocast(pipe: Pipe, x: torch.Tensor) -> Any:
    return torch.autocast(x.device.type, torch.bfloat16), x


def without_autocast_cache(pipe: Pipe, x: torch.Tensor) -> Any:
    return torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False), x


def inference(pipe: Pipe, x: torch.Tensor) -> Any:
    return torch.inference_mode(), x


def no_grad(pipe: Pipe, x: torch.Tensor) -> Any:
    return torch.no_grad(), x


def input_gradients(pipe: Pipe, x: torch.Tensor) -> Any:
    return nullcontext(), x.clone().requires_grad_()


def other_strides(pipe: Pipe, x: torch.Tensor) -> Any:
    return nullcontext(), x.t().contiguous().t()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.shift = torch.rand(WIDTH)
        self.turns = (1,)

    def forward(self, x):
        return (self.layer(x) * self.scale + self.shift.to(x.dtype)).roll(self.turns, (1,))


@pytest.mark.parametrize(
    "change",
    [
        *(shorter, evaluated, moved, cast, frozen, less_dropout, other_layer, other_buffer),
        *(other_attribute, other_sizes, autocast, without_autocast_cache, inference, no_grad),
        *(input_gradients, other_strides),
    ],
    ids=lambda change: change.__name__,
)
def test_changes_after_some_steps(
    change: Callable[[Pipe, torch.Tensor], Any], device: torch.device, record: Record
) -> None:
    """Results equal those without graphs: before a change, after it, and with the former input."""
    dtype = torch.float32 if change in (autocast, without_autocast_cache) else torch.float64
    module, balance = model(device, dropout=0.3)
    scaled = Scaled().to(device)
    scaled.shift = scaled.shift.to(device)
    module = nn.Sequential(*module, scaled).to(dtype)
    balance[-1] += 1
    pipes = [
        pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=use) for use in (True, False)
    ]
    x = data(device)[0].to(dtype)

    def step(pipe: Pipe, context: Any, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        with context:
            output = pipe(x)
        found = [output * 1]
        if output.requires_grad:
            output.float().square().sum().backward()
            found += [p.grad for p in pipe.parameters() if p.grad is not None]
            found += [] if x.grad is None else [x.grad]
            with torch.no_grad():
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            pipe.zero_grad()
            x.grad = None
        return found

    def steps(count: int, changed: list[Any], unit: float) -> None:
        for i in range(count):
            record.spoil()
            results = [step(p, *given, i) for p, given in zip(pipes, changed, strict=True)]
            # The operations are the same, but on a GPU libraries may choose other kernels. And with
            # autocast's cache, the micro-batches of one backward share the cast weight, so that
            # their gradients are summed in bfloat16.
            exact = device.type == "cpu" and change is not autocast
            for a, b in zip(*results, strict=True):
                bound = 0.0 if exact else 64 * unit * max(1.0, b.abs().max().item())
                torch.testing.assert_close(a, b, rtol=0, atol=bound)

    unit = 2**-53 if dtype == torch.float64 else 2**-24
    before = [(nullcontext(), x)] * 2
    steps(3, before, unit)
    assert min(slots(pipes[0])) >= 1
    units = {cast: 2**-24, autocast: 2**-8, without_autocast_cache: 2**-8}
    steps(4, [change(pipe, x) for pipe in pipes], units.get(change, unit))
    if change is not cast:
        for pipe in pipes:
            pipe.train()
        steps(3, before, units.get(change, unit))


class Asks(nn.Module):
    """Multiplies by a number that is different for each combination of torch's settings."""

    known: ClassVar[dict[Any, int]] = {}

    def forward(self, x):
        kinds = ("cpu", "cuda")
        current = (
            torch.get_default_dtype(),
            default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_cache_enabled(),
            *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )
        return x * self.known.setdefault(current, 1 + len(self.known))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_of_torch(device: torch.device, record: Record) -> None:
    """Each setting has graphs of its own, which are used again when the setting returns."""
    Asks.known.clear()
    pipe = pipe_of(nn.Sequential(Asks(), nn.Tanh()), [1, 1], device, chunks=1)
    x, _ = data(device)
    autocast = partial(torch.autocast, device.type)
    settings: list[Callable[[], Any]] = [
        nullcontext,
        partial(default_dtype, torch.float64),
        partial(torch.device, "meta"),
        deterministic,
        partial(autocast, torch.bfloat16),
        partial(autocast, torch.bfloat16, cache_enabled=False),
        partial(autocast, torch.float16),
    ]
    for _ in range(2):
        for setting in settings:
            for _ in range(CAPTURED):
                record.spoil()
                with torch.no_grad(), setting():
                    output, expected = pipe(x), Asks()(x).tanh()
                assert_equal([output], [expected])
        assert slots(pipe) == [len(settings)] * 2
    assert len(Asks.known) == len(settings)


class Numbers(nn.Module):
    """Passes a tensor and a number to the next layer."""

    number = 1.0

    def forward(self, x):
        return {"x": x.sin(), "times": self.number}


class Times(nn.Module):
    def forward(self, value):
        return value["x"] * value["times"]


def test_alternating_inputs(device: torch.device, record: Record) -> None:
    """Of two dtypes, with two numbers, and empty."""
    pipe = pipe_of(nn.Sequential(Numbers(), Times()), [1, 1], device, chunks=1)
    x, _ = data(device)
    for step, given in enumerate([x, x.float(), x[:0]] * 2 * CAPTURED):
        record.spoil()
        number = pipe[0].number = 2.0 + step % 2
        with torch.no_grad():
            assert_equal([pipe(given)], [given.sin() * number])
    assert slots(pipe) == [4, 4]


@skippable(stash=["a", "b"])
class StashesOne(nn.Module):
    first = True

    def forward(self, x):
        yield stash("a", x if self.first else None)
        yield stash("b", None if self.first else x)
        return x.sin()


@skippable(pop=["a", "b"])
class PopsBoth(nn.Module):
    def forward(self, x):
        a = yield pop("a")
        b = yield pop("b")
        return x + (2 * a if b is None else 3 * b)


def test_alternating_skips(device: torch.device, record: Record) -> None:
    """A stage gets tensors of equal number and shapes, but for different skips."""
    pipe = pipe_of(nn.Sequential(StashesOne(), nn.Tanh(), PopsBoth()), [1, 1, 1], device)
    x, _ = data(device)
    for step in range(4 * CAPTURED):
        record.spoil()
        first = pipe[0].first = step % 2 == 0
        with torch.no_grad():
            assert_equal([pipe(x)], [x.sin().tanh() + (2 if first else 3) * x])
    assert slots(pipe)[2] == 2 * slots(pipe)[1]


@torch.no_grad()
def test_inference_mode_and_no_grad(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, _ = data(device)
    expected = pipe(x)
    for context in (torch.inference_mode(), nullcontext()) * 2:
        for _ in range(3):
            record.spoil()
            with context:
                output = pipe(x)
            torch.testing.assert_close(output * 1, expected, rtol=1e-12, atol=1e-12)
    assert not output.is_inference()
