"""``Pipe(cuda_graphs=True)``: the same results as without, whatever is captured, replayed or refused.

On the CPU graphs are recorded ones (``recorded_graphs.py``), whose memory is spoilt whenever nobody
should depend on it.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_graphs import Record, recorded
from recorded_streams import Race, machine
from skip_layers import Pop, Stash
from torch import nn
from torch.nn import functional as F

from pipekernels import NoChunk, Pipe
from pipekernels.ops import graphs as ops_graphs
from pipekernels.ops import p2p_copy
from pipekernels.pipeline import graphs
from pipekernels.pipeline.checkpoint import MODES
from pipekernels.pipeline.schedule import SCHEDULES
from pipekernels.skip import Namespace

WIDTH = 6
CAPTURED = 3  # the step in which everything is captured
STEPS = 5


class CudaRecord(Record):
    """Real graphs tell less of themselves."""

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @capturing.setter
    def capturing(self, value: bool) -> None:
        pass


@pytest.fixture
def record(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    if device.type == "cuda":
        yield CudaRecord()
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    give_back = graphs._Lease.__del__

    def spoilt(lease: graphs._Lease) -> None:
        slot = lease.slot
        backwards = slot.backwards.values()
        for known in (slot, *backwards):
            known.graph.spoil()  # type: ignore[attr-defined]
        give_back(lease)

    monkeypatch.setattr(graphs._Lease, "__del__", spoilt)
    with recorded() as made:
        yield made
    torch.set_num_threads(threads)


class Pair(nn.Module):
    """Returns integers and None as well."""

    def forward(self, x):
        return {"x": x, "index": torch.arange(len(x), device=x.device), "none": None}


class First(nn.Module):
    """Writes to what it is given, as may the first layer of a stage."""

    def forward(self, pair):
        return pair["x"].mul_(1.5) + pair["index"].unsqueeze(1)


def model(device: torch.device, dropout: float = 0.0) -> tuple[nn.Sequential, list[int]]:

    def drop() -> nn.Module:
        return nn.Dropout(dropout) if dropout else nn.Identity()

    torch.manual_seed(0)
    skip = Namespace()
    stages: list[list[nn.Module]] = [
        [Stash().isolate(skip), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Pair()],
        [First(), drop(), nn.Linear(WIDTH, WIDTH)],
        [nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), drop()],
        [Pop().isolate(skip), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)],
    ]
    module = nn.Sequential(*[layer for stage in stages for layer in stage])
    return module.to(device=device, dtype=torch.float64), [len(stage) for stage in stages]


def pipe_of(
    module: nn.Sequential, balance: list[int], device: torch.device, **options: Any
) -> Pipe:
    return Pipe(
        module,
        balance,
        devices=[device] * len(balance),
        **{"chunks": 3, "checkpoint": "never", "cuda_graphs": True} | options,
    )


def slots(pipe: Pipe) -> list[int]:
    """How many micro-batches have graphs, by stage."""
    return [len(stage.slots) for stage in pipe._engine.graphs.values()]


class Held:
    """Tensors that nobody else may change from now on."""

    def __init__(self) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hold(self, *tensors: Any) -> None:
        self._tensors += [(t, t.detach().clone()) for t in tensors]

    def check(self) -> None:
        for tensor, before in self._tensors:
            assert torch.equal(tensor, before)


def train(
    module: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    record: Record | None = None,
    schedule: str | None = None,
    steps: int = STEPS,
) -> list[torch.Tensor]:
    """Losses, gradients of the inputs, and parameters of some steps; inputs change from step to
    step. ``schedule`` is that of a pipe's ``train_step``."""
    results: list[torch.Tensor] = []
    held = Held()
    for step in range(steps):
        torch.manual_seed(step)
        given = (x * 1.1**step).requires_grad_()
        if schedule is None:
            output = module(given)
            loss = F.mse_loss(output, y)
            loss.backward()
            held.hold(output)
            del output
        else:
            lanes = {"lanes": 2} if schedule == "interleaved" else {}
            loss = module.train_step(given, y, F.mse_loss, schedule=schedule, **lanes)
        if record is not None:
            record.spoil()
        assert given.grad is not None
        grads = [parameter.grad for parameter in module.parameters()]
        held.hold(given.grad, *grads)
        results += [loss.detach(), given.grad]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    held.check()
    return [*results, *(parameter.detach() for parameter in module.parameters())]


def data(device: torch.device, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64)
    return x.to(device), y.to(device)


def assert_equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# ---- what is captured ----


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.filterwarnings("error:stage")
def test_equals_the_unwrapped_model(
    schedule: str | None, checkpoint: str, device: torch.device, record: Record
) -> None:
    """Micro-batches are of two sizes, and several are in flight. The plain model is given
    micro-batches, as a row's index is part of what it computes."""
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
    """Neither warming up nor capturing counts as a step."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).to(
        device=device, dtype=torch.float64
    )
    other = pipe_of(copy.deepcopy(module), [2, 1], device, checkpoint=checkpoint, cuda_graphs=False)
    pipe = pipe_of(module, [2, 1], device, checkpoint=checkpoint)
    x, y = data(device)
    assert_equal(train(pipe, x, y, record), train(other, x, y))
    assert min(slots(pipe)) >= 1
    assert_equal(list(pipe.buffers()), list(other.buffers()))


def test_captured_in_the_third_step(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device, chunks=1)
    x, y = data(device)
    for step in range(1, STEPS):
        train(pipe, x, y, record, steps=1)
        assert slots(pipe) == [int(step >= CAPTURED)] * 4
    train(pipe, x, y, record, "gpipe")
    assert slots(pipe) == [1] * 4, "the loop's graphs serve the schedule"


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
    # Three micro-batches of each long input were in flight twice at a time, and one short one.
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
    for step in range(8):
        which = (0, 1, slice(2))[step % 3 if step > 3 else 2]
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


# ---- what changes from step to step ----


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
    """Has the attributes of what it is put in place of."""

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

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift.to(x.dtype)


@pytest.mark.parametrize(
    "change",
    [
        *(shorter, evaluated, moved, cast, frozen, less_dropout, other_layer, other_buffer),
        *(other_attribute, autocast, without_autocast_cache, inference, no_grad),
        *(input_gradients, other_strides),
    ],
    ids=lambda change: change.__name__,
)
def test_what_changes_later(
    change: Callable[[Pipe, torch.Tensor], Any], device: torch.device, record: Record
) -> None:
    """After some steps something changes, and for some steps more the pipe does what one without graphs
    does; then, with what it was before."""
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
            # The operations are the same, but on a GPU libraries may choose other kernels for them;
            # and with a cache, micro-batches that go through autograd at once have their gradients
            # of a weight summed before they are cast.
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


# ---- what cannot be captured ----


class Item(nn.Module):
    def forward(self, x):
        return x * (2.0 if x.sum().item() > 0 else 3.0)


class Chosen(nn.Module):
    def forward(self, x):
        y = x.clone()
        for row in (x[:, 0] > 0).nonzero():
            y = y + row.to(x.dtype).sum()
        return y


class Masked(nn.Module):
    def forward(self, x):
        return x + x[x > 0].sum()


class Hooked(nn.Module):
    def forward(self, x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y


class Remembers(nn.Module):
    seen: tuple[int, ...] = ()

    def forward(self, x):
        self.seen = (*self.seen, len(x))
        return x * len(self.seen)


class Counts(nn.Module):
    count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


class Replaces(nn.Module):
    """Its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean


class Drops(nn.Module):
    def forward(self, x):
        return x * 0 if random.random() < 0.5 else x


class Elsewhere(nn.Module):
    """Draws random numbers on another device."""

    def forward(self, x):
        other = torch.rand(3, device="cpu" if x.is_cuda else "meta")
        return x if other.is_meta else x * other.sum().item()


class Brings(nn.Module):
    """A tensor from another device."""

    def forward(self, x):
        if x.is_cuda:
            return x + torch.arange(WIDTH, dtype=x.dtype).to(x.device)
        return x + len(torch.arange(WIDTH).to("meta"))


class Thing:
    pass


class WithThing(nn.Module):
    def forward(self, x):
        return x, Thing()


class Alone(nn.Module):
    def forward(self, pair):
        return pair[0]


def hooked() -> nn.Module:
    layer = nn.Tanh()
    layer.register_forward_hook(lambda module, given, made: made * 2)
    return layer


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "item": (lambda: [Item()], "the CPU reads a tensor"),
    "nonzero": (lambda: [Chosen()], "a shape depends on values"),
    "mask": (lambda: [Masked()], "a shape depends on values"),
    "tensor hook": (lambda: [Hooked()], "hooks are put on tensors"),
    "state": (lambda: [Remembers()], "Remembers keeps seen from one call to the next"),
    "count": (
        lambda: [Counts()],
        "its layers' tensors or attributes are others in every mini-batch",
    ),
    "buffer": (lambda: [Replaces()], "its layers' tensors or attributes are others in every"),
    "random": (lambda: [Drops()], "Python's random numbers are drawn"),
    "elsewhere": (lambda: [Elsewhere()], "random numbers are drawn on another device"),
    "brings": (lambda: [Brings()], "tensors come from another device, or go there"),
    "hook": (lambda: [hooked()], "Tanh has hooks"),
    "all hooks": (lambda: [nn.Tanh()], "there are hooks on all modules"),
    "object returned": (lambda: [WithThing(), Alone()], "it returns a Thing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_without_what_cannot_be_captured(
    name: str, device: torch.device, record: Record
) -> None:
    """A warning says once which stage and why; the other stages have graphs."""
    make, why = REFUSED[name]
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *make(), nn.Linear(WIDTH, WIDTH)]
    balance = [1] * len(layers)
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    other = pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=False)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    if name == "all hooks":
        everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        random.seed(0)
        ours = train(pipe, x, y, record)
    if name == "all hooks":
        everywhere.remove()
        assert_equal(ours, train(other, x, y))
        assert [str(w.message).partition(": ")[2] for w in told] == [why] * 3
        assert slots(pipe) == [0] * 3
        return
    random.seed(0)
    assert_equal(ours, train(other, x, y))
    messages = sorted(str(w.message) for w in told if "CUDA graphs" in str(w.message))
    assert messages[0].startswith(f"stage 1 runs without CUDA graphs: {why}")
    expected = ["stage 2 runs without CUDA graphs: it is given a Thing"] * ("object" in name)
    assert messages[1:] == expected
    counts = slots(pipe)
    assert counts[0] >= 2 and counts[-1] >= 2 and not any(counts[1:-1])


def test_a_seed_on_the_cpu_is_no_random_number() -> None:
    watch = graphs._Watch(torch.device("meta"))
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in attention.tags
    output, seed = torch.empty(2, device="meta"), torch.empty(())
    assert watch._why_not(attention, [output], [output, seed]) is None
    drawn = watch._why_not(torch.ops.aten.rand.default, [], [seed])
    assert drawn == "random numbers are drawn on another device (rand)"


def test_tensors_that_are_not_cut_up(device: torch.device, record: Record) -> None:
    class Times(nn.Module):
        def forward(self, x, mask):
            return x * mask

    pipe = pipe_of(nn.Sequential(Times(), nn.Tanh()), [1, 1], device)
    x, _ = data(device)

    def evaluate(i: float) -> None:
        mask = torch.full((WIDTH,), i, dtype=torch.float64, device=device)
        with torch.no_grad():
            assert torch.equal(pipe(x, NoChunk(mask)), (x * mask).tanh())

    with pytest.warns(RuntimeWarning, match="stage 0 .* it is given a NoChunk"):
        evaluate(0.0)
    for i in range(1, STEPS):
        evaluate(i)
    assert slots(pipe)[0] == 0 and slots(pipe)[1] > 0


def test_deferred_batch_norm_counts_every_micro_batch(device: torch.device, record: Record) -> None:
    """It counts in Python, so it is refused while it trains; and only then."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(
        device=device, dtype=torch.float64
    )
    other = pipe_of(
        copy.deepcopy(module), [1, 1], device, deferred_batch_norm=True, cuda_graphs=False
    )
    pipe = pipe_of(module, [1, 1], device, deferred_batch_norm=True)
    x, y = data(device)
    with pytest.warns(RuntimeWarning, match="DeferredBatchNorm keeps"):
        ours = train(pipe, x, y, record)
    assert_equal(ours, train(other, x, y))
    assert_equal(list(pipe.buffers()), list(other.buffers()))
    assert slots(pipe)[0] >= 2 and slots(pipe)[1] == 0
    for of in (pipe.eval(), other.eval()):
        ours = train(of, x, y)
    assert slots(pipe)[1] >= 2


class Fails(torch.autograd.Function):
    """Cannot be captured: in the forward, or in the backward. No watch sees it."""

    @staticmethod
    def forward(ctx, x, record, backward):
        ctx.record, ctx.backward = record, backward
        Fails.check(x, record, not backward)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Fails.check(grad, ctx.record, ctx.backward)
        return grad * 2, None, None

    @staticmethod
    def check(x, record, here):
        if here and record.capturing:
            if x.is_cuda:
                torch.cuda.current_stream().synchronize()  # which breaks the capture
            raise RuntimeError("no capture, please\nfurther lines")


class Failing(nn.Module):
    def __init__(self, record: Record, backward: bool) -> None:
        super().__init__()
        self.arguments = record, backward
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.dropout(Fails.apply(self.layer(x), *self.arguments), 0.3)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_capture_that_fails(
    schedule: str | None, backward: bool, device: torch.device, record: Record
) -> None:
    """No step is lost, stages that are captured afterwards are none the worse, nor is what the device
    does without graphs: random numbers, above all."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Failing(record, backward), nn.Dropout(0.2), nn.Tanh()]
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    x, y = data(device)
    others = train(pipe_of(module, [1] * 4, device, cuda_graphs=False), x, y, schedule=schedule)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Failing(record, backward), nn.Dropout(0.2), nn.Tanh()]
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    pipe = pipe_of(module, [1] * 4, device)
    told = "stage 1 runs without CUDA graphs" + (": no capture, please$" * (device.type == "cpu"))
    with pytest.warns(RuntimeWarning, match=told):
        ours = train(pipe, x, y, record, schedule)
    assert_equal(ours, others)
    counts = slots(pipe)
    assert min(counts[0], *counts[2:]) >= 2 and counts[1] == 0
    stream = ops_graphs.streams.current(device)
    assert device.type == "cpu" or stream == torch.cuda.default_stream(device)
    assert torch.rand(2, device=device).isfinite().all()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"]
)
def test_what_a_broken_capture_leaves_behind(
    name: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to torch, with both names of one: CUDA itself is not there."""
    calls: list[Any] = []

    class CudaGraph:
        ended = False

        def pool(self) -> int:
            if not self.ended:
                raise RuntimeError("without a preceding successful capture")
            return 7

    @contextmanager
    def capturing(graph: Any, pool: Any = None, **options: Any) -> Iterator[None]:
        calls.append(("begin", pool))
        try:
            yield
        except ValueError as error:
            if broken:
                raise RuntimeError("the end of the capture") from error
            raise
        finally:
            graph.ended = not (broken and pool)

    handles = iter([7, 8])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CudaGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(ops_graphs, "_failed", [])
    for known in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        monkeypatch.delattr(torch._C, known, raising=False)
    for known in (name, "_cuda_releasePool"):
        call = lambda *arguments, known=known: calls.append((known, *arguments))
        monkeypatch.setattr(torch._C, known, call, raising=False)

    def work() -> None:
        raise ValueError("the work")

    stream: Any = SimpleNamespace(device=torch.device("cpu", 0))
    memory = ops_graphs.Memory()
    with pytest.raises(RuntimeError if broken else ValueError) as failure:
        ops_graphs._record(work, stream, memory)
    assert graphs._reason(failure.value) == "the work"
    if broken:
        left = [(name, 0, 7), ("_cuda_releasePool", 0, 7), ("begin", None)]
        assert calls == [("begin", 7), *left]
        assert memory.handle == 8 and len(ops_graphs._failed) == 1
    else:
        assert calls == [("begin", 7)] and memory.handle == 7 and not ops_graphs._failed


# ---- who may use what, and when ----


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
        parameter.data = parameter.data.clone().fill_(float("nan"))  # not what the graphs use
    loss.backward()
    assert all(p.grad.isfinite().all() for p in pipe.parameters())


def test_who_gets_no_turn_runs_without_graphs(device: torch.device, record: Record) -> None:
    """Forwards, and backwards of forwards that were replayed."""
    module, balance = model(device)
    other = pipe_of(copy.deepcopy(module), balance, device, cuda_graphs=False)
    pipe = pipe_of(module, balance, device)
    x, _ = data(device)
    recorder = pipe._engine.graphs[0].recorder
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
    """The second waits for another mini-batch."""
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    with ops_graphs._one_at_a_time:
        train(pipe, x, y, record)
        assert slots(pipe) == [0] * 4
    train(pipe, x, y, record)
    assert min(slots(pipe)) >= 2


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


def test_most_slots_and_signatures(
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
    with pytest.warns(RuntimeWarning) as told:
        pipe(x)
    messages = sorted(str(warning.message).partition(": ")[2] for warning in told)
    assert messages == [
        "its layers have had 4 different settings",
        "its layers' tensors or attributes are others in every mini-batch",
    ]
    assert len(pipe._engine.graphs[0]._settings) == 4


def test_copies_have_graphs_of_their_own(device: torch.device, record: Record) -> None:
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


def test_a_dropped_pipe_keeps_nothing(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    kept = [weakref.ref(slot) for stage in pipe._engine.graphs.values() for slot in stage.slots]
    assert kept
    output = pipe(x)
    del pipe
    assert any(slot() is not None for slot in kept), "the output's graph"
    del output
    assert all(slot() is None for slot in kept)


def test_memory_of_parameters_that_were_replaced(device: torch.device, record: Record) -> None:
    module, balance = model(device)
    pipe = pipe_of(module, balance, device)
    x, y = data(device)
    train(pipe, x, y, record)
    kept = [weakref.ref(slot) for stage in pipe._engine.graphs.values() for slot in stage.slots]
    pipe.to(torch.float32)
    pipe(x.float())
    assert all(slot() is None for slot in kept)


def test_on_the_cpu_nothing_is_captured() -> None:
    module, balance = model(torch.device("cpu"))
    pipe = pipe_of(module, balance, torch.device("cpu"))
    assert pipe.cuda_graphs and not pipe._engine.graphs
    x, y = data(torch.device("cpu"))
    train(pipe, x, y)


# ---- what keeps memory apart ----

CPU, GPU, OTHER = "cpu", "cuda:0", "cuda:1"


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch sees the CPU's tensors beneath those of a recorded machine."""
    watch = graphs._Watch(torch.device(CPU))
    monkeypatch.setattr(graphs, "_watched", lambda stage, device: nullcontext(watch))


def steps_in_machine(devices: list[str], schedule: str | None, checkpoint: str) -> None:
    """Some steps under streams that change from step to step; nothing may race."""
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
            # The caller's part: gradients were made on these streams.
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
@pytest.mark.parametrize(
    "devices",
    [[GPU] * 4, [GPU, GPU, OTHER, OTHER], [GPU, CPU, OTHER, GPU]],
    ids=" ".join,
)
def test_everything_is_ordered(devices: list[str], schedule: str | None, unwatched: None) -> None:
    case = [None, *SCHEDULES].index(schedule)
    steps_in_machine(devices, schedule, MODES[(case + len(set(devices))) % 3])


@contextmanager
def out_of_order(self: ops_graphs.Recorder) -> Iterator[bool]:
    yield True


def captured_anyhow(self: ops_graphs.Recorder, work: Any, memory: Any) -> Any:
    return ops_graphs._record(work, self._stream, memory)


@pytest.mark.filterwarnings("error:stage")
@pytest.mark.parametrize(
    ("name", "broken"),
    [("turn", out_of_order), ("capture", captured_anyhow)],
    ids=["turns", "captures"],
)
def test_the_order_is_needed(
    name: str, broken: Any, unwatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops_graphs.Recorder, name, broken)
    with pytest.raises(Race):
        two_streams(torch.device(GPU))


@pytest.mark.filterwarnings("error:stage")
def test_two_streams(unwatched: None) -> None:
    two_streams(torch.device(GPU))


def two_streams(place: torch.device) -> None:
    """One pipe, under a stream and another that does not wait for it."""
    module, balance = model(torch.device(CPU))
    with machine() as made, recorded(made) as record, torch.no_grad():
        pipe = Pipe(module, balance, devices=[GPU] * 4, chunks=2, cuda_graphs=True)
        x = p2p_copy(data(torch.device(CPU))[0], GPU)
        made.placing = False
        others = [made.new(place), made.new(place)]
        for stream in others:
            stream.wait_event(made.default(place).record_event())
        for step in range(2 * STEPS):
            with made.using(others[step % 2]):
                pipe(x)
        assert record.replays
        made.synchronize()


def gives_back(lease: Any, slot: Any, signature: Any) -> None:
    lend(lease, slot, signature)
    signature.free.append(slot)


lend = graphs._Lease.__init__


def keeps_aliases(task: Any, grads: Any) -> None:
    for alias, grad in zip(task._aliases, grads, strict=True):
        if grad is not None:
            alias.grad = grad if alias.grad is None else alias.grad.add_(grad)


def counted(memory: Any, values: Any) -> None:
    with torch.no_grad():
        for place, value in zip(memory, values, strict=True):
            place.copy_(value)


class SharedVersions(graphs.StageParameters):
    def __init__(self, module: nn.Module, *, own_versions: bool) -> None:
        super().__init__(module)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (graphs, "_copied", tuple),
        (graphs.GraphedTask, "_accumulate", keeps_aliases),
        (graphs, "_write", counted),
        (graphs, "StageParameters", SharedVersions),
        (graphs._Lease, "__init__", gives_back),
    ],
    ids=["copies", "gradients", "writes", "versions", "leases"],
)
def test_what_a_slot_does_is_needed(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_cases() -> None:
        device = torch.device(CPU)
        with recorded() as record:
            test_equals_the_unwrapped_model("1f1b", "never", device, record)
        with recorded() as record:
            test_who_gets_no_turn_runs_without_graphs(device, record)
        with recorded() as record:
            test_parameters_must_not_change_before_the_backward(device, record)

    all_cases()
    monkeypatch.setattr(owner, name, broken)
    with warnings.catch_warnings(), pytest.raises((AssertionError, RuntimeError)):
        warnings.simplefilter("ignore")
        all_cases()
