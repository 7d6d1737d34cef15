"""Random numbers do not depend on timing, and recomputations have the forward's dropout masks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipe_models import MODELS, WIDTH
from support.pipes import Pipe, on_cpus
from torch import nn
from torch.utils.checkpoint import checkpoint


def needs_one_thread(pipe: Pipe) -> bool:
    """Whether the pipe has found random numbers that depend on the order of threads."""
    observed = pipe._engine.stages.observed
    return observed.hidden or (observed.draws and observed.sets)


def test_stages_and_micro_batches_have_different_masks() -> None:
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    pipe = on_cpus(layers, [1, 1], chunks=4, execution="threads")
    output = pipe(torch.ones(64, 32))
    parts = output.ne(0).chunk(4)
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
    # One mask for both stages would keep 1/2 instead of 1/4. The limit is 6 standard deviations.
    kept = output.ne(0).double().mean()
    assert abs(kept - 0.25) < 6 * (0.25 * 0.75 / output.numel()) ** 0.5


def recurrent(dropout: float) -> nn.Sequential:
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=dropout, batch_first=True)
    return nn.Sequential(lstm, FunctionLayer(lambda y: y[0]))


@pytest.mark.parametrize("begins", ["at once", "in training mode", "in place of other layers"])
def test_randomness_inside_cpp_stays_on_one_thread(begins: str) -> None:
    """An LSTM draws its dropout masks in C++, where workers cannot intercept it."""
    torch.manual_seed(0)
    layers = [recurrent(0.5) for _ in range(2)]
    pipe = on_cpus(nn.Sequential(*layers), [1, 1], chunks=2)
    if begins == "in place of other layers":
        pipe = on_cpus(nn.Sequential(recurrent(0.0), recurrent(0.0)), [1, 1], chunks=2)
        pipe(torch.ones(4, 3, 6)).sum().backward()
        pipe.partitions[0][0], pipe.partitions[1][0] = layers
    elif begins != "at once":
        pipe.eval()
        pipe(torch.ones(4, 3, 6))
        assert not needs_one_thread(pipe)
        for layer in layers:
            layer[0].train()
    torch.manual_seed(1)
    first = pipe(torch.ones(4, 3, 6))
    assert needs_one_thread(pipe)
    first.sum().backward()
    for _ in range(4):
        torch.manual_seed(1)
        again = pipe(torch.ones(4, 3, 6))
        again.sum().backward()
        assert torch.equal(again, first)


def test_a_generator_of_stages_keeps_them_on_one_thread() -> None:
    generator = torch.Generator()
    noise = lambda x: x + torch.rand(x.shape, generator=generator)
    pipe = on_cpus(nn.Sequential(FunctionLayer(noise), FunctionLayer(noise)), [1, 1], chunks=2)
    pipe(torch.ones(4, 4))
    assert needs_one_thread(pipe)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
        lambda: torch.distributions.Gamma(torch.ones(4, 4), 1.0).sample(),
        lambda: torch.rand(4, 4),
    ],
)
def test_layers_that_fork_the_generator_stay_on_one_thread(draw: Callable[[], Any]) -> None:
    """Its state is the process's; they restore it, and workers may not see what they draw."""

    def projected(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return x @ draw()

    module = nn.Sequential(nn.Linear(4, 4), FunctionLayer(projected), FunctionLayer(projected))
    x = torch.randn(8, 4)
    expected, pipe = module(x), on_cpus(copy.deepcopy(module), [2, 1], chunks=4)
    for _ in range(12):
        torch.testing.assert_close(pipe(x), expected)
    assert needs_one_thread(pipe) and torch.random.default_generator is torch.default_generator


def test_visible_randomness_may_use_workers() -> None:
    pipe = on_cpus(MODELS["dropout"].build(torch.float64), [2, 2], chunks=4)
    pipe(torch.ones(8, WIDTH, dtype=torch.float64)).sum().backward()
    assert not needs_one_thread(pipe)


class Recomputed(nn.Sequential):
    """Applies ``torch.utils.checkpoint`` to its own layers; not if ``use_reentrant`` is None."""

    def __init__(self, use_reentrant: bool | None, *layers: nn.Module) -> None:
        super().__init__(*(layers or (nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def gradients(pipe: Pipe, schedule: str | None = None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    pipe.zero_grad()
    x = torch.linspace(-1, 1, 64).view(8, 8)
    if schedule is None:
        pipe(x).square().mean().backward()
    else:
        pipe.train_step(x, None, lambda y: y.square().mean(), schedule=schedule)
    return [p.grad for p in pipe.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_recompute_themselves_have_the_same_masks(use_reentrant: bool) -> None:
    """They get and set the state of the global generator, so they need one thread."""
    module = nn.Sequential(nn.Linear(8, 8), Recomputed(use_reentrant), Recomputed(use_reentrant))
    pipe = on_cpus(module, [2, 1], chunks=4, checkpoint="never")

    pipe(torch.ones(8, 8))  # No backward, which would detect it.
    runs = [gradients(pipe)]
    assert needs_one_thread(pipe)
    runs += [gradients(pipe) for _ in range(8)]
    for layer in module[1:]:
        layer.use_reentrant = None
    torch.testing.assert_close(runs, [gradients(pipe)] * 9, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_layers_that_recompute_themselves_beside_randomness(p: float, use_reentrant: bool) -> None:
    """To recompute, they set the state of the global generator, from which workers draw."""
    layers = lambda: (nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    between = [nn.Sequential(nn.Dropout(p), Recomputed(use_reentrant, *layers())) for _ in range(4)]
    pipe = on_cpus(nn.Sequential(*between), [2, 2], chunks=4, checkpoint="never")
    x = torch.randn(64, 256, requires_grad=True)

    def step() -> None:
        y = pipe(x).square().sum()
        state = torch.get_rng_state()
        y.backward()
        assert torch.equal(torch.get_rng_state(), state)

    step()
    assert needs_one_thread(pipe) == (p > 0)
    for _ in range(20):  # Some run on threads, if the pipe may use them.
        step()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_layers_that_begin_to_recompute(schedule: str | None, use_reentrant: bool) -> None:
    layers = [nn.Linear(8, 8), Recomputed(None), Recomputed(None)]
    pipe = on_cpus(
        nn.Sequential(*layers), [2, 1], chunks=4, checkpoint="never", execution="threads"
    )
    expected = gradients(pipe, schedule)
    layers[1].use_reentrant = layers[2].use_reentrant = use_reentrant
    with pytest.raises(RuntimeError, match="draw random numbers in its backward.*run.*again"):
        gradients(pipe, schedule)
    torch.testing.assert_close(gradients(pipe, schedule), expected, rtol=0, atol=0)
