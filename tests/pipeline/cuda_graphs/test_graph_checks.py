"""Stages that cannot be captured in CUDA graphs, and captures that fail."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.cuda.graph_cases import STEPS, WIDTH, assert_equal, data, pipe_of, slots, train
from support.cuda.recorded_graphs import Record
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from pipekernels import NoChunk
from pipekernels.device import graphs as ops_graphs
from pipekernels.pipeline.cuda_graphs import checks as graph_checks
from pipekernels.pipeline.cuda_graphs import stage_graphs as graphs
from pipekernels.pipeline.stage.task import Activation
from pipekernels.pipeline.values.structure import LONE, Structure

pytestmark = pytest.mark.full


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
    seen: Sequence[int] = ()

    def forward(self, x):
        self.seen = [*self.seen, len(x)]
        return x * len(self.seen)


class Counts(nn.Module):
    count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


class Replaces(nn.Module):
    """Replaces its buffer in every forward."""

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
    """Copies a tensor from another device."""

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
def test_stages_that_cannot_be_captured_run_without_graphs(
    name: str, device: torch.device, record: Record
) -> None:
    """One warning names the stage and the reason; the other stages have graphs."""
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        random.seed(0)
        ours = train(pipe, x, y, record)
    if name == "all hooks":
        everywhere.remove()
        assert_equal(ours, train(other, x, y))
        assert [str(w.message).partition(": ")[2] for w in caught] == [why] * 3
        assert slots(pipe) == [0] * 3
        return
    random.seed(0)
    assert_equal(ours, train(other, x, y))
    messages = sorted(str(w.message) for w in caught if "CUDA graphs" in str(w.message))
    assert messages[0].startswith(f"stage 1 runs without CUDA graphs: {why}")
    expected = ["stage 2 runs without CUDA graphs: it is given a Thing"] * ("object" in name)
    assert messages[1:] == expected
    counts = slots(pipe)
    assert counts[0] >= 2 and counts[-1] >= 2 and not any(counts[1:-1])


class Own(torch.Tensor):
    """A subclass, whose operations may do anything."""


UNFIT: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: torch.ones(2, device="meta"), "a tensor on meta"),
    (lambda: torch.ones(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo"),
    (lambda: torch.ones(2).as_subclass(Own), "a Own"),
]


@pytest.mark.parametrize(("make", "why"), UNFIT)
def test_tensors_that_may_not_enter_or_leave_a_graph(
    make: Callable[[], torch.Tensor], why: str
) -> None:
    cpu = torch.device("cpu")
    for fine in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bool)):
        assert graph_checks.unfit(Activation((fine,), (False,), LONE), cpu) is None
        pair = Activation((fine, make()), (False, False), Structure(tree_flatten((0, 0))[1], ()))
        assert graph_checks.unfit(pair, cpu) == why


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_layers_with_tensors_on_other_devices_or_of_subclasses(kind: str) -> None:
    def layout_with(tensor: torch.Tensor) -> graph_checks.Layout:
        layer = nn.Tanh()
        if kind == "parameter":
            layer.register_parameter("held", nn.Parameter(tensor))
        elif kind == "buffer":
            layer.register_buffer("held", tensor)
        else:
            layer.held = tensor
        return graph_checks.Layout(nn.Sequential(nn.Linear(2, 2), layer), torch.device("cpu"))

    assert layout_with(torch.ones(2)).why_not is None
    assert layout_with(torch.ones(2, device="meta")).why_not == "Tanh has a tensor on meta"
    assert layout_with(torch.ones(2).as_subclass(Own)).why_not == "Tanh has a Own"


def test_a_seed_on_the_cpu_is_not_a_random_number() -> None:
    watch = graph_checks._Watch(torch.device("meta"))
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert torch.Tag.nondeterministic_seeded in attention.tags
    output, seed = torch.empty(2, device="meta"), torch.empty(())
    assert watch._why_not(attention, [output], [output, seed]) is None
    drawn = watch._why_not(torch.ops.aten.rand.default, [], [seed])
    assert drawn == "random numbers are drawn on another device (rand)"


def test_unsplit_tensors(device: torch.device, record: Record) -> None:
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


@pytest.mark.parametrize("sparse", [False, True])
def test_indices_and_sparse_gradients(sparse: bool, device: torch.device, record: Record) -> None:
    """Inputs of integers can be captured, sparse gradients cannot."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, WIDTH, sparse=sparse), nn.Linear(WIDTH, WIDTH))
    module = module.to(device=device, dtype=torch.float64)
    other = pipe_of(copy.deepcopy(module), [1, 1], device, cuda_graphs=False)
    pipe = pipe_of(module, [1, 1], device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            record.spoil()
            indices = (torch.arange(8, device=device) * step) % 10
            for of in (pipe, other):
                of(indices).square().sum().backward()
            grads = [[p.grad.to_dense() for p in of.parameters()] for of in (pipe, other)]
            assert_equal(*grads)
    messages = [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]
    why = "stage 0 runs without CUDA graphs: a gradient has layout torch.sparse_coo"
    assert messages == [why] * sparse
    assert min(slots(pipe)[sparse:]) >= 2 and slots(pipe)[0] * sparse == 0


def test_deferred_batch_norm_counts_every_micro_batch(device: torch.device, record: Record) -> None:
    """It counts in Python while it trains, so it can be captured in evaluation mode only."""
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
    """Raises during a capture of its forward or backward, which no earlier check detects."""

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
                torch.cuda.current_stream().synchronize()  # Invalidates the capture.
            raise RuntimeError("no capture, please\nfurther lines")


class Failing(nn.Module):
    def __init__(self, record: Record, backward: bool) -> None:
        super().__init__()
        self.arguments = record, backward
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)  # It has gradients when a backward fails.

    def forward(self, x):
        return self.after(F.dropout(Fails.apply(self.before(x), *self.arguments), 0.3))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_capture_that_fails(
    schedule: str | None,
    backward: bool,
    device: torch.device,
    record: Record,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No step is lost, later captures work, and so does the device without graphs.

    Random numbers, above all, stay correct.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Failing(record, backward), nn.Dropout(0.2), nn.Tanh()]
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    x, y = data(device)
    others = train(pipe_of(module, [1] * 4, device, cuda_graphs=False), x, y, schedule=schedule)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Failing(record, backward), nn.Dropout(0.2), nn.Tanh()]
    module = nn.Sequential(*layers).to(device=device, dtype=torch.float64)
    pipe = pipe_of(module, [1] * 4, device)
    message = "stage 1 runs without CUDA graphs" + ": no capture, please$" * (device.type == "cpu")
    with pytest.warns(RuntimeWarning, match=message):
        ours = train(pipe, x, y, record, schedule)
    assert caplog.messages[0].startswith("stage 1 runs without CUDA graphs")
    assert_equal(ours, others)
    counts = slots(pipe)
    assert min(counts[0], *counts[2:]) >= 2 and counts[1] == 0
    stream = ops_graphs.streams.current(device)
    assert device.type == "cpu" or stream == torch.cuda.default_stream(device)
    assert torch.rand(2, device=device).isfinite().all()


class Flattens(nn.Linear):
    """Moves a new parameter to other memory, as cuDNN's recurrent layers do."""

    seen: ClassVar[dict[int, nn.Parameter]] = {}

    def forward(self, input):
        if self.seen.get(id(self)) is not self.weight:
            self.seen[id(self)] = self.weight
            self.weight.data = self.weight.data.clone()
        return super().forward(input)


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_that_moves_its_parameters_to_other_memory(
    grad: bool, device: torch.device, record: Record
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Flattens(WIDTH, WIDTH))
    module = module.to(device=device, dtype=torch.float64)
    plain, (x, _) = copy.deepcopy(module), data(device)
    pipe = pipe_of(module, [1, 1], device)
    message = "stage 1 runs without CUDA graphs: a layer gives its parameters other memory"

    def run() -> None:
        for _ in range(STEPS):
            outputs = [of(x) for of in (pipe, plain)]
            assert_equal([outputs[0].detach()], [outputs[1].detach()])
            if grad:
                for output in outputs:
                    output.square().sum().backward()
            record.spoil()

    with torch.set_grad_enabled(grad), pytest.warns(RuntimeWarning, match=message):
        run()
    Flattens.seen.clear()
    assert_equal(list(module.state_dict().values()), list(plain.state_dict().values()))
    if grad:
        assert_equal([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    assert slots(pipe)[1] == 0


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"]
)
def test_a_broken_capture_is_cleaned_up(
    name: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the calls of torch's functions, one of which has two names; CUDA is faked."""
    calls: list[Any] = []

    class CudaGraph:
        ended = False

        def pool(self) -> int:
            if not self.ended:
                raise RuntimeError("without a preceding successful capture")
            return 7

    @contextmanager
    def capturing(graph: Any, pool: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads may use CUDA"
        calls.append(("begin", pool))
        try:
            yield
        except ValueError as error:
            if broken:
                raise RuntimeError("the end of the capture") from error
            raise
        finally:
            graph.ended = not (broken and pool)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
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
    with pytest.raises(RuntimeError if broken else ValueError) as failure:
        ops_graphs._record(work, stream, ops_graphs.new_pool())
    assert graphs._reason(failure.value) == "the work"
    if broken:
        left = [(name, 0, 7), ("_cuda_releasePool", 0, 7), ("begin", None)]
        assert calls == [("begin", 7), *left]
        assert len(ops_graphs._failed) == 1
    else:
        assert calls == [("begin", 7)] and not ops_graphs._failed
