"""Full state of models and optimizers: gathered from the ranks, loaded with any world size."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.checks import assert_raises
from support.ranks import on, on_ranks, run_threads
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop
from torch.torch_version import TorchVersion

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
)

PLAN = {"0": "column", "1": "row", "3": "column_gather_output"}
OPTIMIZERS = [
    partial(Adam, lr=0.05),
    partial(AdamW, lr=0.05, amsgrad=True),
    partial(SGD, lr=0.01, momentum=0.9),
    partial(RMSprop, lr=0.01, centered=True),
]
Make = Callable[[Any], Optimizer]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    linear, norm = partial(nn.Linear, dtype=torch.float64), nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(linear(5, 7), linear(7, 4), norm, linear(4, 6))


def grouped(make: Make, module: nn.Module) -> Optimizer:
    """An optimizer with two groups, whose order is not that of the parameters."""
    named = dict(module.named_parameters())
    norm = [named.pop("2.bias"), named.pop("2.weight")]
    return make([{"params": norm, "weight_decay": 0.1}, {"params": list(named.values())}])


def train(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (3, 1)])
def test_training_continues_with_another_world_size(
    make: Any, before: int, after: int, device: torch.device
) -> None:
    plain = model().to(device)
    copies = [copy.deepcopy(plain) for _ in range(before)]
    others = [copy.deepcopy(plain) for _ in range(after)]
    x = torch.randn(8, 5, dtype=torch.float64).to(device)
    optimizer = grouped(make, plain)
    train(plain, optimizer, x)
    expected = get_optimizer_state_dict(plain, optimizer)
    of_plain = copy.deepcopy(optimizer.state_dict())

    def first(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Any]]:
        sharded = tensor_parallelize(copies[comm.rank], PLAN, comm)
        optimizer = grouped(make, sharded)
        train(sharded, optimizer, x)
        return full_state_dict(sharded), full_optimizer_state_dict(sharded, optimizer)

    ranks = run_threads(before, on(device, first))
    for _, state in ranks:
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], cast(Any, expected["state"]))
    train(plain, optimizer, x)
    weights, state = ranks[0]
    given = copy.deepcopy(state)

    def second(comm: Communicator) -> None:
        sharded = tensor_parallelize(others[comm.rank], PLAN, comm)
        sharded.load_state_dict(weights)
        optimizer = grouped(partial(make, lr=1.0), sharded)
        load_full_optimizer_state_dict(sharded, optimizer, of_plain)
        numbered = optimizer.state_dict()["state"]
        load_full_optimizer_state_dict(sharded, optimizer, state)
        torch.testing.assert_close(optimizer.state_dict()["state"], numbered)
        train(sharded, optimizer, x)
        torch.testing.assert_close(full_state_dict(sharded), plain.state_dict())

    run_threads(after, on(device, second))
    torch.testing.assert_close(state["state"], given["state"], rtol=0, atol=0)


def test_unsharded_models_and_torch_can_load_the_full_state() -> None:
    plain, (comm,) = model(), Communicator.threads(1)
    sharded = tensor_parallelize(copy.deepcopy(plain), PLAN, comm)
    x = torch.randn(8, 5, dtype=torch.float64)
    optimizer = Adam(sharded.parameters())
    train(sharded, optimizer, x)
    state = full_optimizer_state_dict(sharded, optimizer)
    for load in (load_full_optimizer_state_dict, set_optimizer_state_dict):
        loaded = Adam(plain.parameters())
        load(plain, loaded, copy.deepcopy(state))
        written = full_optimizer_state_dict(plain, loaded)
        torch.testing.assert_close(written["state"], state["state"], rtol=0, atol=0)
        assert list(written["state"]) == list(plain.state_dict())


def test_returned_states_are_copies() -> None:
    tied = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4)})
    tied["b"].weight = tied["a"].weight
    for parameter in tied.parameters():
        parameter.grad = torch.ones(4)
    optimizer = SGD(tied.parameters(), lr=1.0, momentum=0.9)
    optimizer.step()
    weights, state = full_state_dict(tied), full_optimizer_state_dict(tied, optimizer)
    assert weights["a.weight"] is weights["b.weight"]
    assert list(state["state"]) == ["a.weight", "a.bias", "b.bias"]
    load_full_optimizer_state_dict(tied, optimizer, state)
    optimizer.step()
    assert weights["a.bias"].tolist() == [-1.0] * 4
    assert state["state"]["a.bias"]["momentum_buffer"].tolist() == [1.0] * 4


def test_errors_state_value_and_remedy() -> None:
    def on_rank(comm: Communicator) -> None:
        sharded = tensor_parallelize(models[comm.rank], PLAN, comm)
        optimizer = Adafactor(sharded.parameters())
        train(sharded, optimizer, torch.ones(8, 5, dtype=torch.float64))
        what = r"a 'row_var' of shape \(., 1\) for a sharded .* such as Adam"
        assert_raises(TypeError, what, full_optimizer_state_dict, sharded, optimizer)

    models = [model(), model()]
    plain = copy.deepcopy(models[0])
    run_threads(2, on_rank)
    (comm,) = Communicator.threads(1)
    optimizer = Adam(plain.parameters(), lr=0.5)
    train(plain, optimizer, torch.ones(8, 5, dtype=torch.float64))
    state = full_optimizer_state_dict(plain, optimizer)
    sharded = tensor_parallelize(copy.deepcopy(plain), PLAN, comm)
    message = r"shape \(7, 5\) .* after tensor_parallelize"
    assert_raises(ValueError, message, full_optimizer_state_dict, sharded, optimizer)
    assert_raises(ValueError, message, load_full_optimizer_state_dict, sharded, optimizer, state)
    wrong = copy.deepcopy(state)
    wrong["state"]["1.weight"]["exp_avg"] = torch.zeros(4, 4)
    fresh, first = Adam(sharded.parameters()), Adam(sharded[0].parameters())
    cases = [
        (fresh, wrong, r"'exp_avg' of shape \(4, 4\) .* full shape is \(4, 7\)"),
        (first, state, "has the parameters 0.weight, 0.bias, but .* 3.bias"),
        (grouped(Adam, sharded), optimizer.state_dict(), "different number of parameter groups"),
        (first, optimizer.state_dict(), "match the size of optimizer.s group"),
    ]
    for loading, given, message in cases:
        assert_raises(ValueError, message, load_full_optimizer_state_dict, sharded, loading, given)
        assert not loading.state and loading.param_groups[0]["lr"] == 0.001


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="FSDP2 of torch 2.6 does not run on CPUs"
)
@on_ranks(4)
def test_layers_that_fsdp_shards_again(world: Communicator) -> None:
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    with Communicator.from_process_group(mesh["shard"].get_group()) as comm:
        plain = model()
        with torch.device("meta"):
            sharded = tensor_parallelize(model(), PLAN, comm)
        fully_shard(sharded, mesh=mesh["replica"])
        sharded.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in sharded:
            layer.reset_parameters()
        optimizer, of_plain = Adam(sharded.parameters()), Adam(plain.parameters())
        for _ in range(2):
            torch.testing.assert_close(full_state_dict(sharded), plain.state_dict())
            train(sharded, optimizer, x)
            train(plain, of_plain, x)
            state = full_optimizer_state_dict(sharded, optimizer)
            torch.testing.assert_close(
                state["state"], full_optimizer_state_dict(plain, of_plain)["state"]
            )
            optimizer = Adam(sharded.parameters())
            load_full_optimizer_state_dict(sharded, optimizer, state)
        world.barrier()
