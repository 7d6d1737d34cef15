"""Parameters with an element for each head: every rank's forward sees those of its own heads."""

import copy
from typing import Any

import pytest
import torch
from support.checks import assert_same_state
from support.ranks import run_threads
from support.reference import gamma
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict, tensor_unparallelize

WIDTH, HEADS = 16, 4
PLAN = {"0": "split_parameters", "0.up": "column", "0.down": "row"}


class Scaled(nn.Module):
    """Heads that are scaled, and to which a sink adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.randn(1, HEADS, 1))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        heads = self.up(x).unflatten(-1, (-1, WIDTH // HEADS))
        heads = (heads * self.scales).logaddexp(self.sinks[:, None])
        result: Tensor = self.down(heads.flatten(-2))
        return result


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks: int) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Scaled()).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    copies = [copy.deepcopy(plain) for _ in range(ranks)]
    expected = plain(x)
    expected.square().sum().backward()
    bound = gamma(8 * WIDTH * ranks, torch.finfo(torch.float64).eps)

    def close(found: Tensor | None, wanted: Tensor | None) -> None:
        assert found is not None and wanted is not None
        torch.testing.assert_close(found, wanted, rtol=0, atol=bound * wanted.abs().max().item())

    def body(comm: Communicator) -> None:
        model = copies[comm.rank]
        own = x.detach().clone().requires_grad_()
        tensor_parallelize(model, PLAN, comm)
        y = model(own)
        y.square().sum().backward()
        close(y, expected)
        close(own.grad, x.grad)
        close(model[0].sinks.grad, plain[0].sinks.grad)
        close(model[0].scales.grad, plain[0].scales.grad)
        assert model[0].sinks.shape == (HEADS,) and isinstance(model[0].sinks, nn.Parameter)
        assert_same_state(full_state_dict(model), plain.state_dict())
        tensor_unparallelize(model)
        assert model(own).equal(plain(own))

    run_threads(ranks, body)


def test_after_an_exception_the_module_has_its_parameters() -> None:
    model = nn.Sequential(Scaled())

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(copy.deepcopy(model), PLAN, comm)
        with pytest.raises(ValueError, match="not a number"):
            own(torch.full((2, WIDTH), torch.nan))
        assert isinstance(own[0].sinks, nn.Parameter) and own[0].sinks.shape == (HEADS,)
        copy.deepcopy(own)

    run_threads(2, body)
