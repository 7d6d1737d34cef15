"""Weights of integers: rounding, the kernel's order, products within the error model, and with the
same bits on all instruction sets. The definition: csrc/tests/products/integer_product_test.cpp."""

import pytest
import torch
from support.reference import gamma
from torch import Tensor

from pipekernels import _backend
from pipekernels.ops.expert_linear import expert_linear
from pipekernels.ops.weights import IntegerWeight
from pipekernels.ops.weights.integers import (
    Integers,
    pack_scale,
    pack_weight,
    pack_zero,
    rounded,
    unpack_scale,
    unpack_weight,
    unpack_zero,
)

FORMATS = [(8, None), (8, 32), (4, 32), (4, 64), (4, 128)]
formats = pytest.mark.parametrize(("bits", "group"), FORMATS)


def block_of(group: int | None) -> int:
    """The elements of x that share a scale."""
    return next(block for block in (128, 64, 32) if (group or 128) % block == 0)


def weight_of(plain: Integers, bits: int) -> IntegerWeight:
    zero = None if plain.zero is None else pack_zero(plain.zero, bits)
    values, n = pack_weight(plain.weight, bits), plain.weight.shape[-2]
    return IntegerWeight(values, n, pack_scale(plain.scale), zero)


def integers(shape: tuple[int, ...], bits: int, group: int | None, zeros: bool) -> Integers:
    plain = rounded(torch.randn(shape), bits, group)
    limit = 1 << (bits - 1)
    zero = torch.randint(-limit, limit, plain.scale.shape).to(torch.int8) if zeros else None
    return plain._replace(zero=zero)


def activation_error(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """How far rounding ``x``, ``[rows, k]``, may move a product: each element by half a step, a
    127th of the largest magnitude of its block, whose scale is rounded to float32."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).abs()
    most = padded.unflatten(-1, (-1, block)).amax(-1).repeat_interleave(block, -1)
    steps = most[..., : x.shape[-1]] / 127 * (0.5 + 127 * 2**-22)
    return steps @ weight.abs().transpose(-1, -2)


@formats
@pytest.mark.parametrize("largest", [1.0, 1e-30, 1e30])
def test_rounding_is_within_its_bounds(bits: int, group: int | None, largest: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 33, 128) * largest
    weight[0, 0] = 0
    plain = rounded(weight, bits, group)
    shape = (3, 33, 1 if group is None else 128 // group)
    assert plain.scale.shape == shape and plain.zero is None
    scale = plain.scale.double().abs().repeat_interleave(128 // shape[-1], -1)
    # A scale in bfloat16 may be an eighth bit too small for the largest element.
    clipped = 0 if group is None else 2**-8 * (1 << (bits - 1))
    error = (plain.floats(torch.float64) - weight.double()).abs()
    assert (error <= scale * ((1 if bits == 4 else 0.5) + clipped + 127 * 2**-23)).all()
    assert plain.floats(torch.float32)[0, 0].eq(0).all()


@formats
@pytest.mark.parametrize("shape", [(1, 128), (16, 128), (37, 256), (2, 3, 70, 384)])
def test_the_kernels_order_is_a_permutation(
    bits: int, group: int | None, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain = integers(shape, bits, group, zeros=True)
    packed, n = pack_weight(plain.weight, bits), shape[-2]
    padded = plain.weight.numel() // n * (n + -n % 16)
    assert packed.nbytes * 8 == bits * padded
    assert unpack_weight(packed, *shape[-2:]).equal(plain.weight)
    assert unpack_scale(pack_scale(plain.scale), n).equal(plain.scale)
    assert plain.zero is not None
    assert unpack_zero(pack_zero(plain.zero, bits), n, bits).equal(plain.zero)


@formats
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_products_are_within_the_error_model(
    bits: int, group: int | None, zeros: bool, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(rows)
    n, k = 70, 384 if group else 416  # Of a row, the last block is shorter.
    block = block_of(group)
    plain = integers((n, k), bits, group, zeros)
    x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)
    own = weight_of(plain, bits)
    with torch.no_grad():
        found = own.linear(x, bias)
    full, x64 = plain.floats(torch.float64), x.double()
    exact = x64 @ full.t() + bias.double()
    size = x64.abs() @ full.abs().t() + bias.double().abs()
    # Of a float32 sum over the blocks, each of which is exact, and of the result.
    rounding = (gamma(-(-k // block) + 4, 2**-24) + torch.finfo(dtype).eps) * size
    assert found.dtype == dtype and found.shape == (rows, n)
    assert ((found.double() - exact).abs() <= activation_error(x64, full, block) + rounding).all()
    # A row's bits do not depend on the others.
    for row in range(min(rows, 5)):
        with torch.no_grad():
            assert own.linear(x[row], bias).equal(found[row])


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 90])
def test_all_instruction_sets_give_the_same_bits(
    bits: int, group: int | None, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(rows)
    module = _backend.load()
    for n, k, zeros in ((37, 384, True), (16, 1152, False), (100, 128, True)):
        own = weight_of(integers((n, k), bits, group, zeros), bits)
        x = (torch.randn(rows, k) * torch.randn(rows, 1).exp()).to(dtype)
        operands = x, own.tensor, own.scale, own.zero, torch.randn(n).to(dtype), None
        results = [x.new_empty(rows, n) for _ in module.INTEGER_ISAS]
        for isa, out in zip(module.INTEGER_ISAS, results, strict=True):
            assert module.integer_product(out, *operands, 1 + isa, isa)
            assert out.equal(results[0])


@formats
def test_the_library_multiplies_by_the_widened_weight(bits: int, group: int | None) -> None:
    torch.manual_seed(0)
    plain = integers((70, 256), bits, group, zeros=True)
    x, bias, out = torch.randn(5, 256), torch.randn(70), torch.empty(5, 70)
    weight_of(plain, bits)._by_library(out, x, bias)
    full = plain.floats(torch.float64)
    size = x.double().abs() @ full.abs().t() + bias.abs()
    exact = x.double() @ full.t() + bias.double()
    assert ((out - exact).abs() <= gamma(264, 2**-24) * size).all()


@formats
def test_experts_have_the_bits_of_their_matrices(bits: int, group: int | None) -> None:
    torch.manual_seed(0)
    plain = integers((5, 37, 128), bits, group, zeros=True)
    x, bias = torch.randn(6, 128), torch.randn(5, 37)
    chosen = torch.randint(0, 5, (6, 2))
    stack = weight_of(plain, bits)
    found = stack.chosen_product(x, bias, chosen)
    for row in range(6):
        for place in range(2):
            expert = int(chosen[row, place])
            with torch.no_grad():
                assert found[row, place].equal(stack[expert].linear(x[row], bias[expert]))
    rows = torch.tensor([3, 0, 2, 0, 1])
    grouped = expert_linear(x, stack, bias, rows)
    for row, expert in enumerate((0, 0, 0, 2, 2, 4)):
        with torch.no_grad():
            assert grouped[row].equal(stack[expert].linear(x[row], bias[expert]))
    with pytest.raises(RuntimeError, match="weights of integers have no gradients"):
        expert_linear(x.clone().requires_grad_(), stack, bias, rows)
    half = stack.chosen_product(x.half(), bias.half(), chosen)
    torch.testing.assert_close(half.float(), found, rtol=2e-2, atol=2e-1)
    assert stack.zero is not None
    operands = x, stack.tensor, stack.scale, stack.zero, bias, chosen, stack.columns
    assert torch.ops.pipekernels.chosen_experts(*operands).equal(found)
    torch.library.opcheck(torch.ops.pipekernels.chosen_experts, operands)


def test_a_row_that_is_not_finite_is_nan_and_no_other() -> None:
    torch.manual_seed(0)
    plain = integers((16, 64), 8, None, zeros=False)
    x = torch.randn(3, 64)
    x[1, 40] = torch.inf
    with torch.no_grad():
        y = weight_of(plain, 8).linear(x)
    assert y.isnan().all(1).tolist() == [False, True, False]
