"""torch.distributed.checkpoint of sharded models, on other numbers of ranks and without shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checks import assert_same_state
from support.ranks import run_processes
from torch import nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import checkpoint_state_dict

PLAN = {
    "embed": "embedding",
    "pack": "packed_column:6,7,3",
    "share": "column/1/1",
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


def sharded(seed: int, comm: Communicator) -> Any:
    shares = PLAN if comm.world_size == 2 else PLAN | {"share": "column"}
    return tensor_parallelize(model_of(seed), shares, comm)


def save(comm: Communicator, now: Path, later: Path) -> None:
    model = sharded(0, comm)
    dcp.save(checkpoint_state_dict(model), checkpoint_id=now)
    saving = dcp.async_save(checkpoint_state_dict(model), checkpoint_id=later)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # The values at the call are saved.
    saving.result()


def load(comm: Communicator, *folders: Path) -> None:
    """The saved model's own shards."""
    for folder in folders:
        model, expected = sharded(1, comm), sharded(0, comm)
        assert not torch.equal(model.down.weight, expected.down.weight)
        before = model.head.weight
        dcp.load(checkpoint_state_dict(model), checkpoint_id=folder)
        assert model.head.weight is before is model.embed.weight
        assert_same_state(model.state_dict(), expected.state_dict())


@pytest.mark.processes
def test_two_ranks_save_and_others_load(tmp_path: Path) -> None:
    folders = tmp_path / "now", tmp_path / "later"
    run_processes(2, save, *folders)
    run_processes(3, load, *folders)
    run_processes(2, load, *folders)
    state = model_of(1).state_dict()
    dcp.load(state, checkpoint_id=folders[0])
    assert_same_state(state, model_of(0).state_dict())
