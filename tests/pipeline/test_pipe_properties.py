"""Random models in a pipe, with every schedule, equal the unwrapped models."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.function_layer import FunctionLayer
from support.pipes import assert_same_gradients
from support.skip_layers import Pop, Stash
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.schedule.program import SCHEDULES
from pipekernels.pipeline.stage.checkpoint import MODES
from pipekernels.skip import Namespace

WIDTH = 4


class OnBoth(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[1]), pair[0]


def forked() -> list[nn.Module]:
    join = FunctionLayer(lambda pair: pair[0] + 2 * pair[1])
    return [FunctionLayer(lambda x: (x, x.sin())), OnBoth(WIDTH, WIDTH), join]


def batch_norm() -> nn.Module:
    """In evaluation mode, as micro-batches have other statistics than the mini-batch."""
    layer = nn.BatchNorm1d(WIDTH).eval()
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer


BLOCKS = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
    "norm": lambda: [nn.LayerNorm(WIDTH)],
    "batch norm": lambda: [batch_norm()],
    "tuple": forked,
    "in place": lambda: [nn.Linear(WIDTH, WIDTH), FunctionLayer(lambda x: x.mul_(1.5))],
    "relu": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
}


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Sequential, list[int]]:
    """A model and a balance of it."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layers: list[nn.Module] = []
    open_skips: list[Namespace] = []
    for _ in range(draw(st.integers(1, 5))):
        what = draw(st.sampled_from([*BLOCKS, "stash", "pop"]))
        if what == "stash":
            open_skips.append(Namespace())
            layers.append(Stash().isolate(open_skips[-1]))
        elif what == "pop" and open_skips:
            index = draw(st.integers(0, len(open_skips) - 1))
            layers.append(Pop().isolate(open_skips.pop(index)))
        elif what != "pop":
            layers += BLOCKS[what]()
    layers += [Pop().isolate(namespace) for namespace in open_skips]
    layers.append(nn.Linear(WIDTH, 2))
    module = nn.Sequential(*layers).double()
    cuts: set[int] = set()
    if len(layers) > 1:
        cuts = draw(st.sets(st.integers(1, len(layers) - 1), max_size=3))
    return module, [b - a for a, b in pairwise([0, *sorted(cuts), len(layers)])]


@pytest.mark.parametrize("execution", ["inline", "threads", "split"])
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    model=models(),
    batch=st.integers(1, 33),
    chunks=st.integers(1, 8),
    checkpoint=st.sampled_from(MODES),
    schedule=st.sampled_from([None, *SCHEDULES]),
)
def test_equals_the_module(execution, device, model, batch, chunks, checkpoint, schedule) -> None:
    if device.type != "cpu" and execution != "inline":
        pytest.skip("one thread issues the work of all stages on CUDA devices")
    module, balance = model
    reference = copy.deepcopy(module).to(device)
    pipe = Pipe(
        module, balance, devices=[device] * len(balance), chunks=chunks, checkpoint=checkpoint,
        execution=execution,
    )  # fmt: skip
    x = torch.randn(batch, WIDTH, dtype=torch.float64, device=device)
    target = torch.randn(batch, 2, dtype=torch.float64, device=device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = nn.functional.mse_loss(reference(a), target)
    expected.backward()
    if schedule is None:
        loss = nn.functional.mse_loss(pipe(b), target)
        loss.backward()
    else:
        lanes = None
        if schedule == "interleaved":
            lanes = next(n for n in (3, 2, 1) if len(balance) % n == 0)
        loss_fn = nn.functional.mse_loss
        loss = pipe.train_step(b, target, loss_fn, schedule=schedule, lanes=lanes)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10, check_layout=False)
    torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10)
    assert_same_gradients(module, reference)
