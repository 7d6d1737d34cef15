"""Experts on several ranks: outputs, gradients and parameters equal those of the full module."""

import copy
from typing import Any

import pytest
import torch
from support.checks import assert_raises, assert_same_state
from support.ranks import run_threads
from torch import Tensor, nn
from torch.nn import functional

from pipekernels import Communicator
from pipekernels.tensor_parallel import full_state_dict
from pipekernels.tensor_parallel.experts import ParallelExperts

EXPERTS, HIDDEN, INNER = 5, 12, 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "Mixtral's": {},
    "GPT-OSS's": {"has_bias": True, "is_transposed": True, "is_concatenated": False},
    "no gate": {"has_gate": False},
    "biased": {"has_bias": True},
    "transposed": {"is_transposed": True},
}


class Experts(nn.Module):
    """As transformers' modules of experts are, in one of their layouts."""

    def __init__(
        self,
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
        is_concatenated: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.act_fn = nn.SiLU()
        name = "gate_up_proj" if has_gate else "up_proj"
        first = INNER * (2 if has_gate else 1)
        shapes = {name: (EXPERTS, first, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
        for key, (count, rows, columns) in shapes.items():
            shape = (count, columns, rows) if is_transposed else (count, rows, columns)
            self.register_parameter(key, nn.Parameter(torch.randn(shape, dtype=dtype) / 3))
            if has_bias:
                bias = nn.Parameter(torch.randn(count, rows, dtype=dtype))
                self.register_parameter(f"{key}_bias", bias)

    def _apply_gate(self, both: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = both.chunk(2, -1)
        else:
            gate, up = both[..., ::2], both[..., 1::2]
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Token by token."""
        rows = []
        for t, row in enumerate(x):
            total = torch.zeros_like(row)
            for expert, weight in zip(chosen[t], weights[t], strict=True):
                name = "gate_up_proj" if self.has_gate else "up_proj"
                inner = self._product(row, name, expert)
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                total = total + weight * self._product(inner, "down_proj", expert)
            rows.append(total)
        return torch.stack(rows)

    def _product(self, row: Tensor, name: str, expert: Tensor) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return functional.linear(row, weight.t() if self.is_transposed else weight, bias)


both = pytest.mark.parametrize("expert_parallel", [False, True], ids=["inside", "expert parallel"])


def routing(tokens: int, count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:count] for _ in range(tokens)])
    return chosen, torch.rand(tokens, count, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@both
@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (2, 2), (3, 1), (4, EXPERTS)])
def test_outputs_and_gradients_equal_those_of_the_full_module(
    layout: str, expert_parallel: bool, ranks: int, count: int
) -> None:
    torch.manual_seed(0)
    full = Experts(**LAYOUTS[layout])
    x = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
    chosen, weights = routing(9, count)
    weights.requires_grad_()
    grad = torch.randn(9, HIDDEN, dtype=torch.float64)
    expected = full(x, chosen, weights)
    expected.backward(grad)
    wanted = {"x": x.grad, "weights": weights.grad}
    wanted |= {name: parameter.grad for name, parameter in full.named_parameters()}

    def body(comm: Communicator) -> None:
        layer = ParallelExperts(full, comm, expert_parallel=expert_parallel)
        own = [t.detach().clone().requires_grad_() for t in (x, weights)]
        y = layer(own[0], chosen, own[1])
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        y.backward(grad)
        found = {"x": own[0].grad, "weights": own[1].grad}
        for name, parameter in layer.named_parameters():
            shared = name in layer.shard_dims
            found[name] = layer.gather(name, parameter.grad) if shared else parameter.grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        with torch.no_grad():  # Through the kernel for few tokens.
            few = layer(x[:2], chosen[:2], weights[:2])
            torch.testing.assert_close(few, expected[:2].detach(), rtol=0, atol=1e-12)
        assert_same_state(full_state_dict(layer), full.state_dict())
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        layer.load_state_dict(full.state_dict())
        back = layer.to_full()
        assert type(back) is Experts
        assert_same_state(back.state_dict(), full.state_dict())

    run_threads(ranks, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 10])
def test_few_tokens_have_the_sums_of_float32(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    full = Experts(dtype=dtype)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    chosen, weights = routing(tokens, 2, dtype)
    expected = copy.deepcopy(full).double()(x.double(), chosen, weights.double())
    (comm,) = Communicator.threads(1)
    with torch.no_grad():
        found = ParallelExperts(full, comm)(x, chosen, weights)
    # Roundings of: gate and up, activation, their product, the second product, the weighted terms
    # and their sum; each at most one unit of the largest intermediate value, of about 8.
    bound = 8 * 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


def test_wrong_arguments_are_refused() -> None:
    (comm,) = Communicator.threads(1)
    layer = ParallelExperts(Experts(), comm)
    chosen, weights = routing(2, 2)
    x, nine = torch.zeros(2, HIDDEN, dtype=torch.float64), torch.full_like(chosen, 9)
    width = r"takes hidden states of shape \[tokens, 12\], got \(2,"
    assert_raises(ValueError, width, layer, x[:, :3], chosen, weights)
    with torch.no_grad():
        assert_raises(ValueError, r"an expert must be in 0\.\.4, got 9", layer, x, nine, weights)
    assert_raises(TypeError, "initialise the model, then shard it", layer.reset_parameters)
    no_comm = "comm must be a pipekernels.Communicator"
    assert_raises(TypeError, no_comm, ParallelExperts, Experts(), None)
    six = Communicator.threads(6)[0]
    assert_raises(ValueError, "5", ParallelExperts, Experts(), six, expert_parallel=True)
