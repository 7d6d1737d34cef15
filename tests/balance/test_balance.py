"""Balances from measurements: measured values, side effects, and the interface.

The interface is that of fairscale's and torchgpipe's ``balance``. Times are of a simulated clock
that only layers advance, so they do not depend on the machine.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.function_layer import FunctionLayer
from support.skip_layers import Pop, Stash
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipekernels import Communicator, NoChunk, Pipe, RowParallelLinear
from pipekernels.balance import balance_by_size, balance_by_time, blockpartition, profile
from pipekernels.balance.profile import PASSES, measure_bytes, measure_seconds
from pipekernels.skip import Namespace

CPU = torch.device("cpu")


class Clock:
    """A simulated clock, in seconds, which only layers advance. Copies of a layer share it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: Any) -> "Clock":
        return self


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return grad, None, None, None


class Work(nn.Module):
    """Advances the clock by given times."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.clock, self.times = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return _Tick.apply(x * self.scale, self.clock, *self.times)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the profiler's clock; only :class:`Work` advances it."""
    clock = Clock()
    monkeypatch.setattr(profile, "perf_counter", clock)
    return clock


def test_by_time_counts_forward_and_backward(clock: Clock) -> None:
    times = [(1, 9), (2, 0), (2, 1), (4, 1), (3, 2)]
    module = nn.Sequential(*(Work(clock, f, b) for f, b in times))
    assert balance_by_time(2, module, torch.rand(3, 1), device="cpu") == [2, 3]
    assert balance_by_time(3, module, torch.rand(3, 1), device="cpu") == [1, 2, 2]


@pytest.mark.parametrize("timeout", [0, 20])
def test_seconds_of_layers(timeout: float, clock: Clock) -> None:
    module = nn.Sequential(Work(clock, 1, 2), Work(clock, 1, 1))
    assert measure_seconds(module, torch.rand(5, 1), CPU, timeout=timeout) == [3, 2]
    assert clock.now >= timeout


class Awkward(nn.Module):
    """Counts calls, overwrites its input, draws random numbers, has buffers and uses its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5, inplace=True)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert self.training
        return self.norm(self.dropout(x.mul_(self.frozen)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_profiling_has_no_side_effects(training: bool, around: Any) -> None:
    module = nn.Sequential(Awkward(), nn.Linear(4, 4), Awkward()).train(training)
    module[1].train(training)
    module[1].weight.grad = grad = torch.randn(4, 4)
    hooked: list[Tensor] = []
    module[1].bias.register_hook(hooked.append)
    before = copy.deepcopy(module)
    sample = torch.randn(6, 4)
    inputs = sample.clone()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    with around():
        balance_by_time(2, module, inputs, timeout=0, device="cpu")
        balance_by_size(2, module, inputs, chunks=2, device="cpu")

    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(inputs, sample) and not inputs.requires_grad
    assert module[1].weight.grad is grad and module[1].bias.grad is None and not hooked
    for name, value in before.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert [m.training for m in module.modules()] == [m.training for m in before.modules()]
    for now, then in zip(module.parameters(), before.parameters(), strict=True):
        assert now.requires_grad == then.requires_grad
    assert module[0].calls == module[2].calls == 0


def test_modes_of_layers_in_a_training_module_are_kept() -> None:
    modes = []

    class Mode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return x

    module = nn.Sequential(Mode(), Mode())
    module[0].eval()
    balance_by_time(1, module, torch.rand(1), timeout=0, device="cpu")
    assert modes == [False, True] * (1 + PASSES)


KINDS = [
    *(nn.Tanh, nn.GELU, nn.Flatten, nn.Identity),
    *(partial(nn.Linear, 6, 6), partial(nn.LayerNorm, 6), partial(nn.BatchNorm1d, 6)),
    *(partial(nn.ReLU, inplace=True), partial(nn.Dropout, 0.5)),
]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
def test_kept_bytes_are_those_that_autograd_saves(kinds: list[Any]) -> None:
    module = nn.Sequential(nn.Linear(6, 6), *(kind() for kind in kinds))
    sample = torch.rand(8, 6)
    sizes = measure_bytes(module, sample, CPU)
    for end in range(1, len(module) + 1):
        stage = module[:end]
        known = {t.untyped_storage().data_ptr() for t in [*stage.parameters(), *stage.buffers()]}
        known.add(sample.untyped_storage().data_ptr())
        saved: dict[Any, Any] = {}

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = stage(sample)
        expected = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in known)
        assert sum(sizes[:end]) == expected
        del outputs


def test_leaves_that_graphs_hold_are_counted() -> None:
    """torchgpipe's test of latent sizes: leaves made by a forward live as long as the graph."""

    def expand(times: int) -> nn.Module:
        made = lambda x: [torch.rand_like(x, requires_grad=True) for _ in range(times)]
        return FunctionLayer(lambda x: x + sum(made(x)))

    sample = torch.rand(10, 10, 10)
    module = nn.Sequential(*map(expand, [1, 2, 3, 4, 5, 6]))
    assert balance_by_size(2, module, sample, device="cpu") == [4, 2]
    assert balance_by_size(2, nn.Sequential(*reversed(module)), sample, device="cpu") == [2, 4]


def test_by_size_weighs_parameters_against_activations() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Sequential(*(nn.Tanh() for _ in range(9)))]
    module = nn.Sequential(*layers, nn.Linear(8, 2))
    sample = torch.rand(64, 8)
    assert balance_by_size(2, module, sample, param_scale=0, device="cpu") == [2, 2]
    assert balance_by_size(2, module, sample, param_scale=1e6, device="cpu") == [1, 3]
    # Chunks make activations smaller.
    module = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Tanh(), nn.Tanh())  # 6.6 KB
    sample = torch.rand(64, 40)  # 10 KB
    assert balance_by_size(2, module, sample, param_scale=1, device="cpu") == [2, 2]
    assert balance_by_size(2, module, sample, chunks=16, param_scale=1, device="cpu") == [1, 3]


@pytest.mark.parametrize("by", [partial(balance_by_time, timeout=0), balance_by_size])
def test_skips_reach_the_layer_that_pops_them(by: Any) -> None:
    inner, outer = Namespace(), Namespace()
    stashes = [Stash().isolate(namespace) for namespace in (outer, inner)]
    pops = [Pop().isolate(namespace) for namespace in (inner, outer)]
    module = nn.Sequential(nn.Linear(4, 4), *stashes, nn.Linear(4, 4), *pops)
    assert sum(by(2, module, torch.rand(3, 4), device="cpu")) == 6


def test_values_between_layers_may_be_nested() -> None:
    give = FunctionLayer(lambda value: {"x": [value["x"] @ value["mask"], None], "name": "any"})
    take = FunctionLayer(lambda value: value["x"][0] + len(value["name"]))
    sample = {"x": torch.rand(6, 4), "mask": NoChunk(torch.rand(4, 4))}
    module = nn.Sequential(give, take)
    assert balance_by_time(2, module, sample, timeout=0, device="cpu") == [1, 1]
    assert balance_by_size(2, module, sample, chunks=3, device="cpu") == [1, 1]


def test_blockpartition_returns_the_blocks() -> None:
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert blockpartition.solve([0, 0], 2) == [[0], [0]]


def test_the_balance_fits_a_pipe(device: torch.device) -> None:
    module = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 10))
    sample = torch.rand(10, 3, 8, 8)
    balance = balance_by_time(2, module, sample, timeout=0, device=device)
    assert next(module.parameters()).device == CPU
    pipe = Pipe(module, balance, devices=[device] * 2, chunks=3)
    assert pipe(sample.to(device)).shape == (10, 10)


BOTH = (balance_by_time, balance_by_size)
TIME, SIZE = BOTH[:1], BOTH[1:]


@pytest.mark.parametrize(
    ("functions", "change", "error", "message"),
    [
        (BOTH, {"module": nn.Linear(2, 2)}, TypeError, "nn.Sequential, not Linear"),
        (BOTH, {"partitions": 0}, ValueError, "partitions is 0"),
        (BOTH, {"partitions": 2.0}, ValueError, "is 2.0; it must be an integer of at least 1"),
        (BOTH, {"partitions": 3}, ValueError, "2 elements cannot be cut into 3"),
        (BOTH, {"sample": "x"}, TypeError, "the sample must be a tensor .* not str"),
        (BOTH, {"sample": ()}, TypeError, "in it, not tuple"),
        (TIME, {"timeout": -1}, ValueError, "timeout is -1"),
        (TIME, {"timeout": float("inf")}, ValueError, "timeout is inf"),
        (TIME, {"timeout": float("nan")}, ValueError, "timeout is nan"),
        (SIZE, {"chunks": 0}, ValueError, "chunks is 0; it must be an integer"),
        (SIZE, {"chunks": 2.5}, ValueError, "chunks is 2.5; it must be an integer"),
        (SIZE, {"param_scale": -2}, ValueError, "param_scale is -2"),
        (SIZE, {"sample": (torch.rand(2, 2), torch.rand(3, 2))}, ValueError, "1 has batch size 3"),
    ],
)
def test_errors(functions: Any, change: Any, error: type[Exception], message: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    options = {"partitions": 2, "module": module, "sample": torch.rand(2, 2), **change}
    given = [options.pop(name) for name in ("partitions", "module", "sample")]
    for by in functions:
        with pytest.raises(error, match=message):
            by(*given, **options, device="cpu")


def test_layers_with_collectives_are_not_timed() -> None:
    # Ranks measure until a timeout: one may call a layer once more, and wait for the others
    # forever.
    with Communicator.threads(1)[0] as comm:
        layer = RowParallelLinear(2, 2, comm=comm)
        module, sample = nn.Sequential(nn.ReLU(), nn.Sequential(layer)), torch.rand(2, 2)
        with pytest.raises(ValueError, match=r"'1.0', a RowParallelLinear, .* measure first"):
            balance_by_time(2, module, sample, device="cpu")
        assert balance_by_size(2, module, sample, device="cpu") == [1, 1]
