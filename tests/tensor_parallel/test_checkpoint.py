"""torch.distributed.checkpoint of sharded models, on other numbers of ranks and without shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checks import assert_same_state
from support.ranks import run_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Adafactor, AdamW, Optimizer

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import OptimizerCheckpoint, checkpoint_state_dict

PLAN = {
    "embed": "embedding",
    "pack": "packed_column:6,7,3",
    "share": "shared_column:2",
    "down": "row",
    "head": "column_gather_output",
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.embed = nn.Embedding(13, 5)
    model.pack = nn.Linear(5, 16)
    model.share = nn.Linear(5, 6)
    model.down = nn.Linear(7, 5)
    model.norm = nn.BatchNorm1d(5)
    model.head = nn.Linear(5, 13, bias=False)
    model.head.weight = model.embed.weight
    return model


def sharded(seed: int, comm: Communicator) -> nn.Module:
    shares = PLAN if comm.world_size == 2 else PLAN | {"share": "column"}
    return tensor_parallelize(model_of(seed), shares, comm)


def save(comm: Communicator, folder: Path) -> None:
    dcp.save(checkpoint_state_dict(sharded(0, comm)), checkpoint_id=folder)


def load(comm: Communicator, folder: Path) -> None:
    """The saved model's own shards."""
    model, expected = sharded(1, comm), sharded(0, comm)
    assert not torch.equal(model.down.weight, expected.down.weight)
    before = model.head.weight
    dcp.load(checkpoint_state_dict(model), checkpoint_id=folder)
    assert model.head.weight is before is model.embed.weight
    assert_same_state(model.state_dict(), expected.state_dict())


@pytest.mark.processes
def test_two_ranks_save_and_others_load(tmp_path: Path) -> None:
    run_processes(2, save, tmp_path)
    run_processes(3, load, tmp_path)
    run_processes(2, load, tmp_path)
    state = model_of(1).state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    assert_same_state(state, model_of(0).state_dict())


def save_while_training(comm: Communicator, folder: Path) -> None:
    model = sharded(0, comm)
    saving = dcp.async_save(checkpoint_state_dict(model), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()


@pytest.mark.processes
def test_values_of_an_asynchronous_save_are_those_of_its_call(tmp_path: Path) -> None:
    run_processes(2, save_while_training, tmp_path)
    run_processes(3, load, tmp_path)


def optimizer_of(model: nn.Module, lr: float) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=lr)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Steps with gradients that are the same elements on any number of ranks: the weights."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    checkpoint = OptimizerCheckpoint(model, optimizer)
    return {"model": checkpoint_state_dict(model), "optimizer": checkpoint}


def save_training(comm: Communicator, folder: Path) -> None:
    """Afterwards, two steps later, the model is as one that was never saved."""
    model, expected = sharded(0, comm), sharded(0, comm)
    optimizer = optimizer_of(model, 0.1)
    train(model, optimizer, 3)
    dcp.save(everything(model, optimizer), checkpoint_id=folder)
    train(model, optimizer, 2)
    train(expected, optimizer_of(expected, 0.1), 5)
    assert_same_state(model.state_dict(), expected.state_dict())


def load_training(comm: Communicator, folder: Path) -> None:
    """Two steps later, the model is as one that was trained without a stop."""
    expected, model = sharded(0, comm), sharded(1, comm)
    train(expected, optimizer_of(expected, 0.1), 5)
    optimizer = optimizer_of(model, 0.7)
    dcp.load(everything(model, optimizer), checkpoint_id=folder)
    train(model, optimizer, 2)
    assert_same_state(model.state_dict(), expected.state_dict())


@pytest.mark.processes
def test_optimizers_go_on_with_other_ranks_and_without_shards(tmp_path: Path) -> None:
    def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        state = get_optimizer_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": state}

    folders = [tmp_path / "sharded", tmp_path / "plain"]
    run_processes(2, save_training, folders[0])
    plain, expected = model_of(1), model_of(0)
    optimizer, of_expected = optimizer_of(plain, 0.7), optimizer_of(expected, 0.1)
    state = whole(plain, optimizer)
    dcp.load(state, checkpoint_id=folders[0])
    set_optimizer_state_dict(plain, optimizer, state["optimizer"])
    train(expected, of_expected, 3)
    dcp.save(whole(expected, of_expected), checkpoint_id=folders[1])
    train(plain, optimizer, 2)
    train(expected, of_expected, 2)
    assert_same_state(plain.state_dict(), expected.state_dict())
    for folder in folders:
        run_processes(3, load_training, folder)
        run_processes(2, load_training, folder)


def test_optimizer_states_that_are_not_sharded_like_their_parameters_are_refused() -> None:
    (comm,) = Communicator.threads(1)
    model = sharded(0, comm)
    train(model, optimizer := Adafactor(model.parameters()), 1)
    with pytest.raises(TypeError, match=r"a 'row_var' of shape .* such as Adam"):
        OptimizerCheckpoint(model, optimizer).state_dict()
