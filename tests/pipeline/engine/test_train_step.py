"""``Pipe.train_step`` with every schedule, compared with the unwrapped model."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import pipe_of
from torch import nn
from torch.nn import functional as F

from pipekernels import Pipe
from pipekernels.pipeline.schedule import SCHEDULES

OPTIONS: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in SCHEDULES}
OPTIONS["interleaved"]["lanes"] = 2


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.GELU()),
        *(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Identity()),
    ).double()


def by_twos(module: Any, chunks: int = 4, checkpoint: Any = "never", **options: Any) -> Pipe:
    devices = [torch.get_default_device()] * 4
    return Pipe(module, [2] * 4, devices=devices, chunks=chunks, checkpoint=checkpoint, **options)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters()]


def test_a_mean_over_valid_tokens() -> None:
    """The example in the docstring of ``train_step``."""
    x, y = torch.randn(8, 2, 5, dtype=torch.float64), torch.randint(3, (8, 2))
    y[:2], y[5, 1] = -100, -100  # One microbatch has no valid tokens, another one too few.
    plain, piped = model(), model()
    expected = F.cross_entropy(plain(x).mT, y)
    expected.backward()
    valid = (y != -100).sum()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.mT, target, reduction="sum") / valid

    loss = by_twos(piped).train_step(x, y, loss_fn, loss_reduction="sum")
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients(piped), gradients(plain), rtol=0, atol=1e-10)


def test_accumulates_into_grad_and_calls_hooks_once(place: torch.device) -> None:
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    module = model()
    pipe = by_twos(module)
    fired: list[int] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    pipe.train_step(x, y, F.mse_loss)
    once = [grad.clone() for grad in gradients(module)]
    assert sorted(fired) == sorted(id(p) for p in module.parameters())
    pipe.train_step(x, y, F.mse_loss)
    torch.testing.assert_close(gradients(module), [2 * grad for grad in once], rtol=0, atol=0)


def test_an_empty_batch(place: torch.device) -> None:
    x, y = torch.empty(0, 5, dtype=torch.float64), torch.empty(0, 3, dtype=torch.float64)
    plain, piped = model(), model()
    F.mse_loss(plain(x), y).backward()
    assert by_twos(piped)(x).shape == (0, 3)
    assert by_twos(piped).train_step(x, y, F.mse_loss).isnan()
    torch.testing.assert_close(gradients(piped), gradients(plain), rtol=0, atol=0)


def test_micro_batches_whose_loss_has_no_gradient(place: torch.device) -> None:
    x = torch.randn(6, 5, dtype=torch.float64)
    wanted = torch.tensor([0, 0, 1, 1, 0, 0])[:, None]
    plain, piped = model(), model()
    plain_x, piped_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    (plain(plain_x) * wanted).sum().backward()

    def loss_fn(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (output if wanted.any() else output.detach()).sum()

    by_twos(piped, chunks=3).train_step(piped_x, wanted, loss_fn, loss_reduction="sum")
    torch.testing.assert_close(piped_x.grad, plain_x.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(piped), gradients(plain), rtol=1e-10, atol=1e-10)


def test_one_tensor_given_twice_gets_both_gradients(place: torch.device) -> None:
    x = torch.ones(4, 2).requires_grad_()
    weighted = FunctionLayer(lambda a, b: a * 3 + b * 4)
    pipe = pipe_of(weighted, nn.Identity(), device=place)
    pipe.train_step((x, x), None, torch.sum, loss_reduction="sum")
    assert torch.equal(x.grad, torch.full_like(x, 7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_in_the_loss_reaches_the_caller(schedule: Any, place: torch.device) -> None:
    x, y = torch.randn(8, 5).double(), torch.randn(8, 3).double()
    module = model()
    pipe = by_twos(module)
    calls: list[int] = []

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no loss today")
        return F.mse_loss(output, target)

    with pytest.raises(ArithmeticError, match="no loss today"):
        pipe.train_step(x, y, failing, **OPTIONS[schedule])
    assert all(p.grad is None for p in module.parameters())
    pipe.train_step(x, y, F.mse_loss, **OPTIONS[schedule])
    expected = model()
    F.mse_loss(expected(x), y).backward()
    torch.testing.assert_close(gradients(module), gradients(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schedule": "2f2b"}, ValueError, "one of gpipe, 1f1b, interleaved, zb-h1"),
        ({"schedule": "interleaved"}, ValueError, "needs a number of lanes"),
        ({"schedule": "1f1b", "lanes": 2}, ValueError, "have one lane per stage"),
        ({"schedule": "interleaved", "lanes": 0}, ValueError, "an integer of at least 1"),
        ({"schedule": "interleaved", "lanes": 3}, ValueError, "multiple"),
        ({"loss_reduction": "median"}, ValueError, "'mean' or 'sum'"),
        ({"target": torch.randn(3, 3)}, ValueError, "must agree"),
        ({"target": 5}, TypeError, "target must be a tensor or a tuple, list or dict"),
        ({"loss_fn": None}, TypeError, "loss_fn must be callable, got NoneType"),
        ({"loss_fn": lambda output, target: 1.0}, TypeError, "must return a tensor"),
        ({"loss_fn": lambda output, target: output}, ValueError, "must return a real scalar"),
    ],
)
def test_bad_arguments(change: Any, error: type[Exception], message: str, tasks: str) -> None:
    given: dict[str, Any] = {"target": torch.randn(4, 3).double(), "loss_fn": F.mse_loss}
    given.update(change)
    with pytest.raises(error, match=message):
        by_twos(model()).train_step(torch.randn(4, 5).double(), **given)


class Precise(nn.Linear):
    """Disables autocast; its backward must be without autocast, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


def test_backwards_are_not_in_the_callers_autocast(tasks: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Precise(8, 8), Precise(8, 8))
    x = torch.randn(8, 8)
    module(x).square().sum().backward()
    expected = gradients(module)
    seen: set[torch.dtype] = set()  # Losses are in the caller's autocast.

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        seen.add((output @ output.T).dtype)
        return output.square().sum()

    module.zero_grad()
    pipe = pipe_of(*module, chunks=4, checkpoint="never")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.train_step(x, None, loss_fn, loss_reduction="sum")
    torch.testing.assert_close(gradients(module), expected)  # In float32; bfloat16 has 8 bits.
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits_of_a_loss_that_uses_the_parameters(schedule: Any) -> None:
    """They do not depend on whether each stage is shown, and so runs by itself."""

    def penalised(module: nn.Module, output: torch.Tensor, target: Any) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in module.parameters())
        return scale * F.mse_loss(output, target[0] * target[1]) + penalty

    x, y = torch.randn(8, 5), (torch.randn(8, 3), torch.arange(8)[:, None] % 2)
    scale = torch.tensor(2.0, requires_grad=True)  # A parameter of the loss alone.
    plain = model().float()
    penalised(plain, plain(x), y).backward()
    expected, results = [scale.grad, *gradients(plain)], []
    for is_shown in (False, True):
        scale.grad = None
        pipe = by_twos(model().float())
        with pipe.timeline() if is_shown else nullcontext():
            pipe.train_step(x, y, partial(penalised, pipe), **OPTIONS[schedule])
        results.append([scale.grad, *gradients(pipe)])
    torch.testing.assert_close(results[0], expected)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_penalty_counts_parameters_that_stages_share_once(place: torch.device) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).double()
        layers[2].weight = layers[0].weight
        return layers

    def penalised(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in module.parameters())
        return output.square().mean() + penalty

    plain, x = tied(), torch.randn(8, 3, dtype=torch.float64)
    loss = penalised(plain, plain(x))
    loss.backward()
    pipe = Pipe(tied(), [2, 2], devices=[place] * 2, chunks=4)
    torch.testing.assert_close(pipe.train_step(x, None, partial(penalised, pipe)), loss.detach())
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    assert len(list(pipe.named_parameters(remove_duplicate=False))) == 4


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_without_a_gradient_raises(frozen: bool) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe.requires_grad_(not frozen)

    def detached(output: torch.Tensor) -> torch.Tensor:
        return output.detach().sum()

    with pytest.raises(RuntimeError, match="no loss requires a gradient"):
        pipe.train_step(torch.ones(4, 2), None, torch.sum if frozen else detached)
    scale = torch.ones((), requires_grad=True)  # Trained instead, by one microbatch of two.
    losses = iter([lambda y: y.detach().sum(), lambda y: y.detach().sum() * scale])
    pipe.train_step(
        torch.ones(4, 2), None, lambda y: next(losses)(y), schedule="gpipe", loss_reduction="sum"
    )
    assert scale.grad is not None and all(p.grad is None for p in pipe.parameters())


def test_a_loss_that_works_in_place(place: torch.device) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sub_(target).square().mean()

    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    plain, piped = model(), model()
    loss_fn(plain(x) * 1, y).backward()
    by_twos(piped).train_step(x, y, loss_fn)
    torch.testing.assert_close(gradients(piped), gradients(plain))
