"""Embeddings, output heads and losses over a sharded vocabulary; shards that several ranks hold."""

import copy
from typing import Any

import pytest
import torch
from support.checks import assert_full_gradients, assert_raises, assert_same_state
from support.ranks import on, on_ranks, run_threads
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

ROWS, WIDTH, CPU = 11, 6, torch.device("cpu")


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
    other = {key: value + 1 for key, value in plain.state_dict().items()}

    def body(comm: Communicator) -> None:
        for head in ("colwise_gather_output", "column"):
            model = copy.deepcopy(copies[comm.rank])
            tensor_parallelize(model, {"embed": "embedding_rowwise", "head": head}, comm)
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
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            torch.testing.assert_close(clip_grad_norm_(model, 1e9), norm)
            assert_full_gradients(model, plain)
            model.load_state_dict(other)
            model = copy.deepcopy(model)
            assert tensor_unparallelize(model) is model and str(model) == str(plain)
            assert (model.embed.weight is model.head.weight) == tied
            assert_same_state(model.state_dict(), other)

    run_threads(world_size, on(device, body))


@on_ranks(2, run_threads)
def test_initialisation_is_that_of_the_full_embedding(comm: Communicator) -> None:
    layer, rows = VocabParallelEmbedding(ROWS, WIDTH, 4, comm=comm), (6, 5)[comm.rank]
    assert layer.weight.shape == (rows, WIDTH)
    layer.reset_parameters()
    assert layer.weight.shape == (rows, WIDTH) and not layer.full_state_dict()["weight"][4].any()


@on_ranks(2, run_threads)
def test_bad_embeddings_and_indices_are_refused(comm: Communicator) -> None:
    layer, sharded = VocabParallelEmbedding(ROWS, WIDTH, comm=comm), VocabParallelEmbedding
    for bad in (-1, ROWS):
        assert_raises(IndexError, "out of range", layer, torch.tensor([0, bad]))
    for full, error, message in [
        (nn.Embedding(4, 2, max_norm=1.0), ValueError, "max_norm=1.0 is not supported"),
        (nn.Linear(4, 2), TypeError, "must be an nn.Embedding, got Linear"),
        (nn.Embedding(1, 2), ValueError, "cannot shard 1 features over 2 ranks"),
    ]:
        assert_raises(error, message, sharded.from_embedding, full, comm)
    model, message = decoder(False, CPU), "'norm', a .*LayerNorm, but only nn.Embedding"
    assert_raises(TypeError, message, tensor_parallelize, model, {"norm": "embedding"}, comm)


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
    options: Any = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -1}
    expected = functional.cross_entropy(wide.flatten(0, 1), target.flatten(), **options)
    if reduction == "none":
        expected = expected.view(4, 3)
    else:
        weights = torch.ones(())
    (expected * weights).sum().backward()

    def body(comm: Communicator) -> None:
        own = logits.tensor_split(3, -1)[comm.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, target, ROWS, comm, **options)
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected.detach())
        (loss * weights).sum().backward()
        torch.testing.assert_close(own.grad, full.grad.tensor_split(3, -1)[comm.rank])

    run_threads(3, on(device, body))


@on_ranks(2, run_threads)
def test_a_loss_without_rows_is_nan_and_bad_arguments_are_refused(comm: Communicator) -> None:
    def loss(target: list[int], classes: int = 6, **options: Any) -> Tensor:
        logits = torch.zeros(2, 3)
        return vocab_parallel_cross_entropy(logits, torch.tensor(target), classes, comm, **options)

    assert loss([-100, -100]).isnan()
    assert loss([-100, -100], reduction="sum") == 0
    message = "0 to 5, or ignore_index=-100; got some from 0 to 6"
    assert_raises(IndexError, message, loss, [0, 6])
    assert_raises(IndexError, "got some from -1 to 0", loss, [0, -1])
    assert_raises(ValueError, r"holds 4 of 8 classes.*\(2, 4\), got \(2, 3\)", loss, [0, 1], 8)
    assert_raises(ValueError, r"logits must have shape \(1, 3\)", loss, [0])
    assert_raises(ValueError, "got 'max'", loss, [0, 1], reduction="max")
    assert_raises(ValueError, "between 0 and 1, got 2", loss, [0, 1], label_smoothing=2)


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
    norm = nn.utils.get_total_norm([parameter.grad for parameter in full.parameters()])

    def body(comm: Communicator) -> None:
        model: Any = nn.Sequential(copy.deepcopy(full))
        tensor_parallelize(model, {"0": "column/2/2"}, comm)
        assert isinstance(model[0], ColumnParallelLinear)
        own = (first, first, second, second)[comm.rank]
        y = model(x)
        torch.testing.assert_close(y, own.detach())
        (y * weights[comm.rank]).sum().backward()
        state = full_state_dict(model)
        assert_same_state(state, nn.Sequential(full).state_dict())
        torch.testing.assert_close(clip_grad_norm_(model, 1e9), norm)
        assert_full_gradients(model, nn.Sequential(full))
        model.load_state_dict({key: value + 1 for key, value in state.items()})
        assert torch.equal(tensor_unparallelize(model)[0].weight, full.weight + 1)

    run_threads(4, on(device, body))
