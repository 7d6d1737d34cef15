"""What is not a layer of features but belongs to heads: parameters with an element for each head,
a module with an output for each, a norm that all share. Every rank computes its own heads."""

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
PLAN = {
    "0": "split_parameters",
    "0.up": "column",
    "0.down": "row",
    "0.gate": "split_output",
    "0.norm": "replicated_with_grad_allreduce",
}


class Scaled(nn.Module):
    """Heads that are normalized, gated and scaled, and to which a sink adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, HEADS), nn.LayerNorm(WIDTH // HEADS)
        self.scales = nn.Parameter(torch.randn(1, HEADS, 1))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        heads = self.norm(self.up(x).unflatten(-1, (-1, WIDTH // HEADS)))
        heads = heads * self.gate(x)[..., None]
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

    def same_gradients(model: Any) -> None:
        for name, parameter in plain.named_parameters():
            if name.split(".")[1] not in ("up", "down"):
                close(model.get_parameter(name).grad, parameter.grad)

    def body(comm: Communicator) -> None:
        model = copies[comm.rank]
        own = x.detach().clone().requires_grad_()
        tensor_parallelize(model, PLAN, comm)
        y = model(own)
        y.square().sum().backward()
        close(y, expected)
        close(own.grad, x.grad)
        same_gradients(model)
        assert model[0].sinks.shape == (HEADS,) and isinstance(model[0].sinks, nn.Parameter)
        assert_same_state(full_state_dict(model), plain.state_dict())
        tensor_unparallelize(model)
        assert model(own).equal(plain(own))
        model.zero_grad()
        model(own).square().sum().backward()
        same_gradients(model)  # No hook is left that sums them over the ranks.

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
