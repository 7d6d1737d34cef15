"""Layers with weights of integers: outputs within the error model, states, refusals."""

import copy
from typing import Any

import pytest
import torch
from support.checks import assert_raises
from support.ranks import run_threads
from support.reference import gamma
from test_experts import HIDDEN, INNER, LAYOUTS, Experts, both, routing
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.ops.weights.integers import Integers, rounded
from pipekernels.tensor_parallel import full_state_dict, quantize_weights, tensor_unparallelize
from pipekernels.tensor_parallel.experts import ParallelExperts

PLAN = {"0": "column", "2": "row", "3": "column_gather_output", "4": "row_split_input"}
FORMATS = [(8, None), (8, 32), (4, 32)]
formats = pytest.mark.parametrize(("bits", "group"), FORMATS)
KEPT = 2**-22  # Of rounding x: the error of its scale.


def mlp(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (24, 50, 33)) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = sizes
    layers = [nn.Linear(first, second), nn.ReLU(), nn.Linear(second, first)]
    return nn.Sequential(*layers, nn.Linear(first, third), nn.Linear(third, 7, bias=False)).to(
        dtype
    )


def dequantized(module: nn.Module, bits: int, group: int | None) -> nn.Module:
    """With the weights that integers stand for, in float64."""
    result = copy.deepcopy(module).double()
    for parameter, float_ in zip(result.parameters(), module.parameters(), strict=True):
        if parameter.dim() > 1:
            parameter.data = rounded(float_.data, bits, group).floats(torch.float64)
    return result


def error_of(layers: Any, x: Tensor, relative: float) -> Tensor:
    """The most that a result may be off. A layer rounds its input, by a 254th of the largest
    magnitude at most, adds ``relative`` of its sums of absolute products, and multiplies what the
    layers before have added."""
    error = torch.zeros_like(x)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.abs(), 0 if layer.bias is None else layer.bias.abs()
            most = (x.abs() + error).amax(-1, keepdim=True)
            error = error + most / 127 * (0.5 + 127 * KEPT)
            sums = (x.abs() + error) @ weight.t() + bias
            error = error @ weight.t() + relative * sums
        x = layer(x)
    return error


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 9])
@formats
def test_layers_equal_the_model_of_the_dequantized_weights(
    ranks: int, dtype: torch.dtype, rows: int, bits: int, group: int | None
) -> None:
    full = mlp(dtype, (24, 50, 33) if group is None else (192, 192, 192))
    features: Any = full[0].in_features
    x = torch.randn(rows, features).to(dtype)
    plain = dequantized(full, bits, group)
    exact = plain(x.double()).detach()
    # A rank's sum, the sum over ranks, and that with the bias are rounded to the dtype.
    relative = gamma(50 + ranks, 2**-24) + gamma(4, torch.finfo(dtype).eps / 2)
    bound = error_of(plain, x.double(), relative)

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), PLAN, comm)
        assert quantize_weights(model, bits=bits, group_size=group) is model
        assert all(m.weight.dtype == torch.uint8 for m in model if type(m) is not nn.ReLU)
        y = model(x)
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound).all()
        state = full_state_dict(model)
        for name in PLAN:
            integers = rounded(full.get_parameter(f"{name}.weight").data, bits, group)
            assert state[f"{name}.scale"].equal(integers.scale)
            assert state[f"{name}.weight"].equal(integers.weight)
        # The full state loads into a model of other weights, and this rank's into another one.
        for own in (state, model.state_dict()):
            other = copy.deepcopy(full).requires_grad_(False)
            other = tensor_parallelize(other, PLAN, comm)
            for parameter in other.parameters():
                parameter.mul_(1.5)
            quantize_weights(other, bits=bits, group_size=group).load_state_dict(own)
            assert other(x).equal(y)
        tensor_unparallelize(model)
        weights = full_state_dict(model)
        assert list(weights) == list(full.state_dict())
        integers = Integers(state["0.weight"], state["0.scale"])
        assert weights["0.weight"].equal(integers.floats(dtype))

    run_threads(ranks, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@both
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_experts_equal_those_of_the_dequantized_weights(
    layout: str, expert_parallel: bool, ranks: int
) -> None:
    torch.manual_seed(0)
    full = Experts(**LAYOUTS[layout], dtype=torch.float32)
    exact = copy.deepcopy(full).double()
    for parameter, float_ in zip(exact.parameters(), full.parameters(), strict=True):
        if parameter.dim() == 3:
            value = float_.data.transpose(1, 2) if full.is_transposed else float_.data
            value = rounded(value, 8, None).floats(torch.float64)
            parameter.data = value.transpose(1, 2) if full.is_transposed else value
    x = torch.randn(30, HIDDEN)
    chosen, weights = routing(30, 2, torch.float32)
    positive = copy.deepcopy(exact)
    for parameter in positive.parameters():
        parameter.data.abs_()

    def body(comm: Communicator) -> None:
        model = nn.Sequential(ParallelExperts(full, comm, expert_parallel=expert_parallel))
        quantize_weights(model)
        [layer] = model
        assert layer.down_proj.dtype == torch.uint8
        for tokens in (1, 30):  # With and without sorting.
            operands = x[:tokens], chosen[:tokens], weights[:tokens]
            expected = exact(operands[0].double(), operands[1], operands[2].double()).detach()
            # Of sums of absolute products. SiLU has a slope of at most 1.1, and is at least half
            # of a positive number: it makes an error 2.2 times as large, and the gate adds another.
            # Rounding moves an element by a 254th of the largest, which replaces them all.
            most = torch.ones(HIDDEN) * operands[0].abs().amax(-1, keepdim=True)
            sums = positive(most.double(), operands[1], operands[2].double()).detach()
            unit = (1 / 254 + KEPT) * HIDDEN
            bound = (4 * unit + gamma(4 * (HIDDEN + 4) + INNER + 12, 2**-24)) * sums
            assert ((layer(*operands).double() - expected).abs() <= bound).all()
        state = full_state_dict(model)
        again = nn.Sequential(ParallelExperts(full, comm, expert_parallel=expert_parallel))
        for parameter in again.parameters():
            parameter.data.mul_(2)
        quantize_weights(again).load_state_dict(state)
        assert again[0](x, chosen, weights).equal(layer(x, chosen, weights))
        tensor_unparallelize(model)
        torch.testing.assert_close(
            dict(model[0].named_parameters()),
            {name: p.float() for name, p in exact.named_parameters()},
        )

    run_threads(ranks, body)


def test_scales_stay_float32_when_the_model_is_converted() -> None:
    [comm] = Communicator.threads(1)
    model = quantize_weights(tensor_parallelize(mlp(), PLAN, comm))
    before = model[0].scale.clone()
    model.bfloat16()
    assert model[0].scale.equal(before)
    assert model[0].weight.dtype == torch.uint8
    assert model(torch.ones(1, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model[0].to_full().weight.dtype == torch.bfloat16


def test_what_is_not_supported_is_refused_in_words() -> None:
    [comm] = Communicator.threads(1)
    assert_raises(ValueError, "call tensor_parallelize", quantize_weights, mlp())
    assert_raises(ValueError, "bits must be 8 or 4, got 5", quantize_weights, mlp(), bits=5)
    for size in (0, 48, 16, 32.0):
        message = f"group_size must be a multiple of 32, or None, got {size}"
        assert_raises(ValueError, message, quantize_weights, mlp(), group_size=size)
    cut = tensor_parallelize(mlp(), {"0": "column"}, comm)
    message = "'0' has 24 input features on a rank, which groups of 32 do not divide"
    assert_raises(ValueError, message, quantize_weights, cut, bits=4)
    plain = nn.Sequential(nn.Linear(256, 256))
    invariant = tensor_parallelize(plain, {"0": "column"}, comm, invariant=True)
    message = "'0' has invariant=True, which does not support weights of integers"
    assert_raises(ValueError, message, quantize_weights, invariant)
    model: Any = quantize_weights(tensor_parallelize(mlp(), PLAN, comm))
    x, message = torch.ones(1, 24, requires_grad=True), r"have no gradients; use torch.no_grad\(\)"
    assert_raises(RuntimeError, message, model, x)
    message = "has no sharded linear layers or experts in floats"
    assert_raises(ValueError, message, quantize_weights, model)
    message, x = r"expects 24 features .* got a tensor of shape \(1, 23\)", torch.ones(1, 23)
    assert_raises(ValueError, message, model, x)
    assert_raises(
        TypeError, "weights of integers, which are made from floats", model[0].reset_parameters
    )


def test_torchao_quantizes_column_parallel_and_whole_layers() -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def quantized(model: nn.Module) -> nn.Module:
        config = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
        torchao.quantize_(model, config, lambda _, name: name in ("0", "4"))
        return model

    full, x = mlp(), torch.randn(8, 24)
    whole = quantized(copy.deepcopy(full))
    assert not whole(x).equal(full(x))

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), {"0": "column", "2": "row"}, comm)
        torch.testing.assert_close(quantized(model)(x), whole(x))
        assert_raises(TypeError, "call quantize_weights", tensor_parallelize, whole, PLAN, comm)

    run_threads(2, body)


def test_weights_that_are_not_finite_are_an_error_on_all_ranks() -> None:
    full = mlp()

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), PLAN, comm)
        if comm.rank == 1:
            model[2].weight.data[0, 0] = torch.inf
        with pytest.raises(ValueError, match="'2' has weights that are not finite"):
            quantize_weights(model)
        assert not any(p.dtype == torch.uint8 for p in model.parameters())

    run_threads(2, body)
