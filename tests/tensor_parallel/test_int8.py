"""Weights of int8: outputs within the error model, states, conversions and refusals."""

import copy

import pytest
import torch
from support.checks import assert_raises
from support.ranks import run_threads
from support.reference import gamma
from test_experts import HIDDEN, INNER, LAYOUTS, Experts, both, routing
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.ops.weights import Int8Weight
from pipekernels.ops.weights.int8 import floats_of, int8_of
from pipekernels.tensor_parallel import full_state_dict, quantize_weights, tensor_unparallelize
from pipekernels.tensor_parallel.experts import ParallelExperts
from pipekernels.tensor_parallel.int8 import Int8Experts, Int8Linear

PLAN = {"0": "column", "2": "row", "3": "column_gather_output", "4": "row_split_input"}


def scale_of(weight: Tensor) -> Tensor:
    return weight.abs().amax(-1).float() / 127


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 24), nn.Linear(24, 33)]
    return nn.Sequential(*layers, nn.Linear(33, 7, bias=False)).to(dtype)


def dequantized(module: nn.Module) -> nn.Module:
    """With the weights that int8 stands for, in float64."""
    result = copy.deepcopy(module).double()
    for parameter, float_ in zip(result.parameters(), module.parameters(), strict=True):
        if parameter.dim() > 1:
            scale = scale_of(float_.data)
            parameter.data = floats_of(int8_of(float_.data, scale), scale, torch.float64)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("k", [1, 64, 301])
def test_products_are_within_the_error_model(dtype: torch.dtype, rows: int, k: int) -> None:
    torch.manual_seed(k)
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(70, k).to(dtype)
    bias = torch.randn(70).to(dtype)
    scale = scale_of(weight)
    integers = int8_of(weight, scale)
    with torch.no_grad():
        found = Int8Weight(integers, scale).linear(x, bias).double()
    x64, w64 = x.double(), weight.double()
    expected = x64 @ w64.t() + bias.double()
    # Half a step of each weight; int8_of() divides in float32, so a tie may go either way.
    quantization = x64.abs().sum(-1, keepdim=True) * scale.double() * (0.5 + 127 * 2**-23)
    magnitude = x64.abs() @ (w64.abs() + scale.double()[:, None]).t() + bias.double().abs()
    # Three roundings to the dtype: the product, the scaled one, and with the bias.
    rounding = (gamma(k + 3, 2**-24) + gamma(3, torch.finfo(dtype).eps / 2)) * magnitude
    assert ((found - expected).abs() <= quantization + rounding).all()
    exact = x64 @ floats_of(integers, scale, torch.float64).t() + bias.double()
    assert ((found - exact).abs() <= rounding).all()


def error_of(layers: nn.Module, x: Tensor, relative: float) -> Tensor:
    """The most that a result may be off: a layer adds ``relative`` of its sums of absolute
    products, and multiplies what the layers before have added."""
    error = torch.zeros_like(x)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.abs(), 0 if layer.bias is None else layer.bias.abs()
            sums = (x.abs() + error) @ weight.t() + bias
            error = error @ weight.t() + relative * sums
        x = layer(x)
    return error


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 9])
def test_layers_equal_the_model_of_the_dequantized_weights(
    ranks: int, dtype: torch.dtype, rows: int
) -> None:
    full = mlp(dtype)
    x = torch.randn(rows, 24).to(dtype)
    exact = dequantized(full)(x.double()).detach()
    # A rank's sum, scaled, the sum over ranks, and that with the bias are rounded to the dtype.
    relative = gamma(50 + ranks, 2**-24) + gamma(4, torch.finfo(dtype).eps / 2)
    bound = error_of(dequantized(full), x.double(), relative)

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), PLAN, comm)
        assert quantize_weights(model) is model
        assert [type(m) for m in model if type(m) is not nn.ReLU] == [Int8Linear] * 4
        y = model(x)
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= bound).all()
        state = full_state_dict(model)
        for name in PLAN:
            weight = full.get_submodule(name).weight.data
            assert state[f"{name}.scale"].equal(scale_of(weight))
            assert state[f"{name}.weight"].equal(int8_of(weight, scale_of(weight)))
        # The full state loads into a model of other weights, and this rank's into another one.
        for own in (state, model.state_dict()):
            other = copy.deepcopy(full).requires_grad_(False)
            other = tensor_parallelize(other, PLAN, comm)
            for parameter in other.parameters():
                parameter.mul_(1.5)
            quantize_weights(other).load_state_dict(own)
            assert other(x).equal(y)
        tensor_unparallelize(model)
        weights = full_state_dict(model)
        assert list(weights) == list(full.state_dict())
        assert weights["0.weight"].equal(floats_of(state["0.weight"], state["0.scale"], dtype))

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
            scale = scale_of(value)
            value = floats_of(int8_of(value, scale), scale, torch.float64)
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
        assert type(layer) is Int8Experts
        for tokens in (1, 30):  # By the kernel, and by the library.
            operands = x[:tokens], chosen[:tokens], weights[:tokens]
            expected = exact(operands[0].double(), operands[1], operands[2].double()).detach()
            # Of sums of absolute products. SiLU has a slope of at most 1.1, and is at least half
            # of a positive number: it makes an error 2.2 times as large, and the gate adds another.
            sums = positive(operands[0].double().abs(), operands[1], operands[2].double()).detach()
            bound = gamma(4 * (HIDDEN + 4) + INNER + 12, 2**-24) * sums
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
    assert model[0].weight.dtype == torch.int8
    assert model(torch.ones(1, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model[0].to_full().weight.dtype == torch.bfloat16


def test_rows_of_zeros_stay_zeros() -> None:
    [comm] = Communicator.threads(1)
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    quantize_weights(tensor_parallelize(model, {"0": "column"}, comm))
    assert model(torch.ones(2, 8)).equal(torch.zeros(2, 4))


def test_what_is_not_supported_is_refused_in_words() -> None:
    [comm] = Communicator.threads(1)
    assert_raises(ValueError, "call tensor_parallelize", quantize_weights, mlp())
    plain = nn.Sequential(nn.Linear(256, 256))
    invariant = tensor_parallelize(plain, {"0": "column"}, comm, invariant=True)
    message = "'0' has invariant=True, which does not support int8"
    assert_raises(ValueError, message, quantize_weights, invariant)
    model = quantize_weights(tensor_parallelize(mlp(), PLAN, comm))
    x, message = torch.ones(1, 24, requires_grad=True), r"have no gradients; use torch.no_grad\(\)"
    assert_raises(RuntimeError, message, model, x)
    message = "has no sharded linear layers or experts in floats"
    assert_raises(ValueError, message, quantize_weights, model)
    message, x = "takes 24 features on cpu, got a tensor of shape", torch.ones(1, 23)
    assert_raises(ValueError, message, model, x)
    assert_raises(TypeError, "int8 weights, which are made from floats", model[0].reset_parameters)


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
        assert not any(isinstance(layer, Int8Linear) for layer in model)

    run_threads(2, body)
