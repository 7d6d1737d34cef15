"""torch's own transformer layers, with their heads sharded."""

import copy
from typing import Any

import pytest
import torch
from support.checks import assert_full_gradients, assert_raises, assert_same_state
from support.ranks import on, on_ranks, run_threads
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict, tensor_unparallelize
from pipekernels.tensor_parallel.attention import ParallelMultiheadAttention

WIDTH, HEADS = 12, 6


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def masks(kind: str, batch: int, rows: int, columns: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    padding = torch.zeros(batch, columns, dtype=torch.bool)
    padding[0, -1] = True
    attn = torch.rand(rows, columns, generator=generator) < 0.3
    attn[:, 0] = False  # A row without any column is NaN.
    numbers = torch.rand(batch * HEADS, rows, columns, generator=generator, dtype=torch.float64)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "attn": {"attn_mask": attn},
        "heads": {"attn_mask": numbers, "key_padding_mask": padding.double()},
    }[kind]


@pytest.mark.parametrize("kind", ["none", "padding", "attn", "heads"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("batch_first", "ranks"), [(False, 3), (True, 3), (True, 4)])
def test_attention_is_that_of_the_full_layer(
    batch_first: bool, ranks: int, cross: bool, kind: str, device: torch.device
) -> None:
    full = attention(batch_first=batch_first, bias=kind != "attn").to(device)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator)
    memory = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=generator) if cross else query
    given = {key: m.to(device) for key, m in masks(kind, 2, 5, memory.shape[1]).items()}
    if not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)

    def run(layer: nn.Module) -> list[Tensor]:
        x = query.to(device).requires_grad_()
        y = memory.to(device).requires_grad_() if cross else x
        own = {key: m.clone().requires_grad_(m.is_floating_point()) for key, m in given.items()}
        found = []
        for options in (
            {"need_weights": False},
            {"average_attn_weights": True},
            {"average_attn_weights": False},
        ):
            output, weights = layer(x, y, y, **own, **options)
            found += [output] if weights is None else [output, weights]
        sum(tensor.square().sum() for tensor in found).backward()
        leaves = x, y, *(mask for mask in own.values() if mask.requires_grad)
        return [tensor.detach() for tensor in [*found, *(leaf.grad for leaf in leaves)]]

    plain = copy.deepcopy(full)
    expected = run(plain)

    def body(comm: Communicator) -> None:
        model: Any = nn.Sequential(copy.deepcopy(full))
        tensor_parallelize(model, {"0": "attention"}, comm)
        layer = model[0]
        assert isinstance(layer, ParallelMultiheadAttention)
        torch.testing.assert_close(run(layer), expected)
        state = full_state_dict(model)
        assert_same_state(state, nn.Sequential(full).state_dict())
        assert_full_gradients(model, nn.Sequential(plain))
        model.load_state_dict(state)
        tensor_unparallelize(model)
        assert str(model[0]) == str(full)
        assert torch.equal(model[0].in_proj_weight, full.in_proj_weight)

    run_threads(ranks, on(device, body))


def test_one_sequence_without_a_batch() -> None:
    full = attention()
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = full(x, x, x)

    def body(comm: Communicator) -> None:
        output, weights = ParallelMultiheadAttention(full, comm)(x, x, x)
        torch.testing.assert_close((output, weights), expected)

    run_threads(2, body)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_auto_shards_a_whole_transformer(training: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    full = nn.Transformer(
        WIDTH, HEADS, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    full = full.double().train(training)
    source = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    target = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)

    def run(model: nn.Module) -> Tensor:
        output: Tensor = model(source, target, tgt_mask=causal, tgt_is_causal=True)
        output.square().sum().backward()
        return output.detach()

    plain = copy.deepcopy(full)
    expected = run(plain)

    def body(comm: Communicator) -> None:
        model = tensor_parallelize(copy.deepcopy(full), "auto", comm)
        assert sum(isinstance(m, ParallelMultiheadAttention) for m in model.modules()) == 6
        torch.testing.assert_close(run(model), expected)
        with torch.no_grad():  # In evaluation torch's fused kernel would run.
            torch.testing.assert_close(model(source, target, tgt_mask=causal), expected)
        assert_full_gradients(model, plain)
        assert str(tensor_unparallelize(model)) == str(full)

    run_threads(2, body)


@on_ranks(2, run_threads)
def test_what_cannot_be_sharded_is_refused(comm: Communicator) -> None:
    for layer, error, message in [
        (attention(kdim=4), ValueError, "kdim, vdim, add_bias_kv and add_zero_attn are not"),
        (attention(add_zero_attn=True), ValueError, "kdim, vdim, add_bias_kv"),
        (nn.MultiheadAttention(4, 1), ValueError, "2 ranks cannot share 1 attention heads"),
        (nn.Linear(4, 4), TypeError, "must be an nn.MultiheadAttention, got torch.nn.modules"),
    ]:
        assert_raises(error, message, ParallelMultiheadAttention, layer, comm)
    model = nn.Sequential(attention(), nn.Linear(WIDTH, WIDTH))
    message = "'1', a torch.*Linear, but only nn.MultiheadAttention"
    assert_raises(TypeError, message, tensor_parallelize, model, {"[01]": "attention"}, comm)
    layer = ParallelMultiheadAttention(attention(), comm)
    x, message = torch.ones(3, 1, WIDTH).double(), "is a hint about attn_mask, which is missing"
    assert_raises(ValueError, message, layer, x, x, x, is_causal=True)
