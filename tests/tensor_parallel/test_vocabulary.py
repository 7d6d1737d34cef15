"""Embeddings, output heads and losses over a sharded vocabulary; shards that several ranks hold."""

import copy
from typing import Any

import pytest
import torch
from support.ranks import on, run_threads
from torch import Tensor, nn
from torch.nn import functional

from pipekernels import ColumnParallelLinear, Communicator, tensor_parallelize
from pipekernels.tensor_parallel import (
    VocabParallelEmbedding,
    clip_grad_norm_,
    full_state_dict,
    tensor_unparallelize,
    vocab_parallel_cross_entropy,
)

ROWS, WIDTH = 11, 6


class Decoder(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=7)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def decoder(tied: bool, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    return Decoder(tied).double().to(device)


def ids(device: torch.device) -> Tensor:
    return torch.randint(0, ROWS, (3, 5), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_vocabulary_gives_the_values_and_gradients_of_the_full_one(
    tied: bool, world_size: int, device: torch.device
) -> None:
    plain, x = decoder(tied, device), ids(device)
    copies = [copy.deepcopy(plain) for _ in range(world_size)]
    target = (x + 3) % ROWS
    logits = plain(x)
    loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    loss.backward()

    def body(comm: Communicator) -> None:
        for head in ("column_gather_output", "column"):
            model = copy.deepcopy(copies[comm.rank])
            tensor_parallelize(model, {"embed": "embedding", "head": head}, comm)
            assert isinstance(model.embed, VocabParallelEmbedding)
            assert (model.embed.weight is model.head.weight) == tied
            found = model(x)
            if head == "column":
                own = vocab_parallel_cross_entropy(found, target, ROWS, comm)
            else:
                torch.testing.assert_close(found, logits.detach())
                own = functional.cross_entropy(found.flatten(0, 1), target.flatten())
            torch.testing.assert_close(own, loss.detach())
            own.backward()
            norm = clip_grad_norm_(model, 1e9)
            for parameter in model.parameters():
                parameter.data = parameter.grad
            gradients = full_state_dict(model)
            for key, parameter in plain.named_parameters():
                torch.testing.assert_close(gradients[key], parameter.grad)
            squares = [parameter.grad.square().sum() for parameter in plain.parameters()]
            torch.testing.assert_close(norm, sum(squares).sqrt())

    run_threads(world_size, on(device, body))


@pytest.mark.parametrize("tied", [False, True])
def test_the_full_vocabulary_comes_back(tied: bool) -> None:
    plain = decoder(tied, torch.device("cpu"))
    copies = [copy.deepcopy(plain) for _ in range(2)]
    other = {key: value + 1 for key, value in plain.state_dict().items()}

    def body(comm: Communicator) -> None:
        plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
        model = tensor_parallelize(copies[comm.rank], plan, comm)
        model.load_state_dict(other)
        model = copy.deepcopy(model)
        assert (model.embed.weight is model.head.weight) == tied
        assert tensor_unparallelize(model) is model
        assert str(model) == str(plain)
        assert (model.embed.weight is model.head.weight) == tied
        assert model.state_dict().keys() == other.keys()
        for key, value in model.state_dict().items():
            assert torch.equal(value, other[key]), key
        assert model.embed.padding_idx == 7

    run_threads(2, body)


def test_initialisation_is_that_of_the_full_embedding() -> None:
    def body(comm: Communicator) -> list[Any]:
        layer = VocabParallelEmbedding(ROWS, WIDTH, 4, comm=comm)
        before = layer.weight.clone()
        layer.reset_parameters()
        return [before.shape, layer.weight.shape, layer.full_state_dict()["weight"][4].tolist()]

    first, second = run_threads(2, body)
    assert first == [(6, WIDTH), (6, WIDTH), [0.0] * WIDTH]
    assert second == [(5, WIDTH), (5, WIDTH), [0.0] * WIDTH]


def test_bad_embeddings_and_indices_are_refused() -> None:
    def body(comm: Communicator) -> None:
        layer = VocabParallelEmbedding(ROWS, WIDTH, comm=comm)
        for bad in (-1, ROWS):
            with pytest.raises(IndexError, match=f"rows 0 to {ROWS - 1}, got indices from"):
                layer(torch.tensor([0, bad]))
        with pytest.raises(ValueError, match=r"max_norm=1.0 is not supported"):
            VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0), comm)
        with pytest.raises(TypeError, match="must be an nn.Embedding, got Linear"):
            VocabParallelEmbedding.from_embedding(nn.Linear(4, 2), comm)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot shard 1 features over 2 ranks"):
            VocabParallelEmbedding.from_embedding(nn.Embedding(1, 2), comm)
        model = decoder(False, torch.device("cpu"))
        with pytest.raises(TypeError, match="'norm', a .*LayerNorm, but only nn.Embedding"):
            tensor_parallelize(model, {"norm": "embedding"}, comm)

    run_threads(2, body)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_is_that_of_the_full_logits(
    dtype: torch.dtype, reduction: str, smoothing: float, device: torch.device
) -> None:
    logits = (torch.randn(4, 3, ROWS, dtype=torch.float64) * 30).to(device, dtype)
    target = torch.randint(0, ROWS, (4, 3)).to(device)
    target[1, 2] = target[3, 0] = -1
    weights = torch.randn(4, 3, dtype=torch.float64).to(device)
    full = logits.detach().requires_grad_()
    wide = full.float() if dtype == torch.bfloat16 else full
    options: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "ignore_index": -1,
    }
    expected = functional.cross_entropy(wide.flatten(0, 1), target.flatten(), **options)
    expected = expected.view(4, 3) if reduction == "none" else expected
    (expected * (weights if reduction == "none" else 1)).sum().backward()

    def body(comm: Communicator) -> None:
        own = logits.tensor_split(3, -1)[comm.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, target, ROWS, comm, **options)
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected.detach())
        (loss * (weights if reduction == "none" else 1)).sum().backward()
        assert full.grad is not None
        torch.testing.assert_close(own.grad, full.grad.tensor_split(3, -1)[comm.rank])

    run_threads(3, on(device, body))


def test_a_loss_without_rows_is_nan_and_bad_arguments_are_refused() -> None:
    def body(comm: Communicator) -> None:
        logits = torch.zeros(2, 3)

        def loss(target: list[int], classes: int = 6, **options: Any) -> Tensor:
            return vocab_parallel_cross_entropy(
                logits, torch.tensor(target), classes, comm, **options
            )

        assert loss([-100, -100]).isnan()
        assert loss([-100, -100], reduction="sum") == 0
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            ([0, 6], {}, IndexError, "0 to 5, or ignore_index=-100; got some from 0 to 6"),
            ([0, -1], {}, IndexError, "got some from -1 to 0"),
            ([0, 1], {"classes": 8}, ValueError, r"holds 4 of 8 classes.*\(2, 4\), got \(2, 3\)"),
            ([0], {}, ValueError, r"logits must have shape \(1, 3\)"),
            ([0, 1], {"reduction": "max"}, ValueError, "got 'max'"),
            ([0, 1], {"label_smoothing": 2}, ValueError, "between 0 and 1, got 2"),
        ]
        for target, options, error, message in cases:
            with pytest.raises(error, match=message):
                loss(target, **options)

    run_threads(2, body)


@pytest.mark.parametrize("bias", [False, True])
def test_shards_that_several_ranks_hold(bias: bool, device: torch.device) -> None:
    """Two shards on four ranks; each rank weighs its output otherwise."""
    torch.manual_seed(0)
    full = nn.Linear(5, 6, bias).double().to(device)
    x = torch.randn(2, 5, dtype=torch.float64, device=device)
    weights = torch.randn(4, 2, 3, dtype=torch.float64, device=device)
    first, second = full(x).split(3, -1)
    loss = sum((part * weights[i]).sum() for i, part in enumerate([first, first, second, second]))
    loss.backward()
    squares = sum(parameter.grad.square().sum() for parameter in full.parameters())

    def body(comm: Communicator) -> None:
        model = nn.Sequential(copy.deepcopy(full))
        tensor_parallelize(model, {"0": "shared_column:2"}, comm)
        layer = model[0]
        assert isinstance(layer, ColumnParallelLinear)
        own = (first, first, second, second)[comm.rank]
        y = model(x)
        torch.testing.assert_close(y, own.detach())
        (y * weights[comm.rank]).sum().backward()
        state = full_state_dict(model)
        assert all(torch.equal(state[f"0.{key}"], v) for key, v in full.state_dict().items())
        torch.testing.assert_close(clip_grad_norm_(model, 1e9), squares.sqrt())
        for name, parameter in full.named_parameters():
            gathered = layer.gather(name, layer.get_parameter(name).grad)
            torch.testing.assert_close(gathered, parameter.grad)
        model.load_state_dict({key: value + 1 for key, value in state.items()})
        assert torch.equal(tensor_unparallelize(model)[0].weight, full.weight + 1)

    run_threads(4, on(device, body))


def test_copies_that_do_not_fit_are_refused() -> None:
    def body(comm: Communicator) -> None:
        for arguments, message in [
            ({"copies": 4}, "copies=4 must divide the number of ranks, 6"),
            ({"copies": 0}, "copies=0"),
            ({"copies": 2, "gather_output": True}, "neither blocks nor gather_output"),
            ({"copies": 2}, "3 shards, each with copies=2, .* but there are 4 features"),
        ]:
            with pytest.raises(ValueError, match=message):
                ColumnParallelLinear(4, 4, comm=comm, **arguments)

    run_threads(6, body)
