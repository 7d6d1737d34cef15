"""In float32 a pipe has the bits of a loop over its microbatches, whatever layouts meet at the
boundaries of stages."""

from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import on_cpus
from support.sweeps.pipes import differs
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_outputs_require_gradients_as_in_the_plain_model(checkpoint: Any, tasks: str) -> None:
    def read(value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, mask = value
        return hidden * torch.from_numpy(mask.numpy().copy())  # Refused if it required one.

    layers = [
        nn.Linear(4, 4),
        FunctionLayer(lambda x: (x.relu(), (x[:, :1] > 0).float())),
        FunctionLayer(read),
    ]
    pipe = on_cpus(
        nn.Sequential(*layers, FunctionLayer(lambda x: (x, (x > 0).float()))),
        [2, 1, 1], chunks=4, checkpoint=checkpoint,
    )  # fmt: skip
    output, mask = pipe(torch.randn(8, 4))
    assert output.requires_grad and not mask.requires_grad
    output.sum().backward()


def test_a_recomputation_with_another_graph_is_an_error(tasks: str) -> None:
    calls: list[int] = []

    def alternate(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.tanh() if len(calls) <= 4 else x.sigmoid()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), FunctionLayer(alternate))
    pipe = on_cpus(model, [1, 2], chunks=4, checkpoint="always")
    output = pipe(torch.randn(8, 4))
    with pytest.raises(RuntimeError, match=r"recomputation of stages? .* made a graph .* differs"):
        output.sum().backward()


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.full)], ids=str
)
def test_random_layers(seeds: range) -> None:
    """Views, strides, several tensors: see :mod:`support.sweeps.pipes`."""
    assert [text for seed in seeds if (text := differs(seed)) is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 500), marks=pytest.mark.full)], ids=str
)
def test_random_training(seeds: range) -> None:
    """Layers are frozen, hooked, cast, replaced, evaluated between steps: nothing kept is stale."""
    assert not [text for seed in seeds if (text := differs(seed, steps=5, changes=3))]
