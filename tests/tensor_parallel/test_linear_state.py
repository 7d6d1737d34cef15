"""Row- and column-parallel linear layers as modules: initialisation, state, copies, errors."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from support.checks import assert_raises, assert_same_state
from support.ranks import on, run_threads
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear
from pipekernels.tensor_parallel import full_state_dict

WORLD_SIZES = [1, 2, 3, 4]
IN, OUT = 13, 7  # Divided by no world size but 1.


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", [RowParallelLinear, ColumnParallelLinear])
def test_initialisation_is_that_of_nn_linear(
    kind: Any, world_size: int, device: torch.device
) -> None:
    torch.manual_seed(3)
    full = nn.Linear(IN, OUT, device=device)
    after = torch.rand((), device=device)
    layers = []
    for comm in Communicator.threads(world_size):
        torch.manual_seed(3)
        layers.append(kind(IN, OUT, comm=comm, device=device))
        assert torch.rand((), device=device) == after  # As many random numbers as nn.Linear draws.
        torch.manual_seed(3)
        again = copy.deepcopy(layers[-1])
        again.reset_parameters()
        assert torch.equal(again.weight, layers[-1].weight)
    dim = 1 if kind is RowParallelLinear else 0
    assert torch.equal(torch.cat([layer.weight for layer in layers], dim), full.weight)
    if kind is ColumnParallelLinear:
        assert torch.equal(torch.cat([layer.bias for layer in layers]), full.bias)
    else:
        assert all(torch.equal(layer.bias, full.bias) for layer in layers)
    sizes = [layer.weight.shape[dim] for layer in layers]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_full_state_dict_round_trip(world_size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    full: Any = nn.Sequential(nn.Linear(5, IN), nn.LayerNorm(3), nn.Sequential(nn.Linear(IN, 4)))
    state = full.to(device).state_dict()

    def on_rank(comm: Communicator) -> None:
        model: Any = nn.Sequential(
            ColumnParallelLinear(5, IN, comm=comm, device=device),
            nn.LayerNorm(3, device=device),
            nn.Sequential(RowParallelLinear(IN, 4, comm=comm, device=device)),
        )
        model.load_state_dict(state)
        assert_same_state(full_state_dict(model), state)
        assert torch.equal(model[0].full_state_dict()["weight"], full[0].weight)

        other = copy.deepcopy(model)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        other.load_state_dict(model.state_dict())  # This rank's part.
        assert torch.equal(other[0].weight, model[0].weight)
        other.load_state_dict(state, assign=True)
        assert torch.equal(other[0].weight, model[0].weight)
        assert other[0].weight.untyped_storage().nbytes() == other[0].weight.nbytes
        assert_raises(RuntimeError, "0.weight", model.load_state_dict, {**state, "0.weight": 3})
        wrong = {**state, "0.weight": torch.zeros(IN + 1, 5)}
        assert_raises(RuntimeError, "size mismatch for 0.weight", model.load_state_dict, wrong)

    run_threads(world_size, on(device, on_rank))
    assert state["0.weight"].shape == (IN, 5)  # Loading does not change the caller's dict.


def test_a_state_dict_hook_that_replaces_shards_is_refused() -> None:
    def halve(module: nn.Module, state: dict[str, Any], *rest: Any) -> None:
        state["0.weight"] = state["0.weight"].half()

    (comm,) = Communicator.threads(1)
    model = nn.Sequential(ColumnParallelLinear(4, 6, comm=comm))
    hook = model.register_state_dict_post_hook(halve)
    with pytest.raises(RuntimeError, match="has replaced parameters of sharded layers; remove it"):
        full_state_dict(model)
    hook.remove()
    assert full_state_dict(model)["0.weight"].shape == (6, 4)


def test_the_full_state_of_wrapped_layers_has_the_unwrapped_keys() -> None:
    full: Any = nn.Sequential(nn.Linear(5, IN), nn.Linear(IN, 4))

    def on_rank(comm: Communicator) -> None:
        column = ColumnParallelLinear.from_linear(full[0], comm)
        row = RowParallelLinear.from_linear(full[1], comm)
        written = full_state_dict(nn.Sequential(checkpoint_wrapper(column), row))
        assert_same_state(written, full.state_dict())
        assert not any(value.requires_grad for value in written.values())

    run_threads(2, on_rank)


def test_from_linear_keeps_dtype_mode_and_frozen_parameters() -> None:
    linear = nn.Linear(4, 6, dtype=torch.bfloat16).eval()
    linear.bias.requires_grad_(False)
    (comm,) = Communicator.threads(1)
    state = torch.random.get_rng_state()
    for kind in (RowParallelLinear, ColumnParallelLinear):
        layer = kind.from_linear(linear, comm)
        assert layer.weight.dtype == torch.bfloat16
        assert not layer.training
        assert layer.weight.requires_grad
        assert not layer.bias.requires_grad
        assert layer.weight.data_ptr() != linear.weight.data_ptr()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_copies_share_the_communicator_and_pickling_names_the_remedy() -> None:
    comm, _ = Communicator.threads(2)
    layer = RowParallelLinear(4, 6, comm=comm)
    holder: Any = nn.Sequential(layer)
    shallow, deep = copy.copy(layer), copy.deepcopy(holder)[0]
    assert type(shallow) is RowParallelLinear and shallow.weight is layer.weight
    assert shallow.comm is deep.comm is comm
    assert deep.weight is not layer.weight and torch.equal(deep.weight, layer.weight)
    assert_raises(TypeError, "cannot be pickled.*state_dict", pickle.dumps, layer)


def test_errors_state_value_limit_and_remedy() -> None:
    comm, _ = Communicator.threads(2)
    Row, Column, sharded = RowParallelLinear, ColumnParallelLinear, RowParallelLinear.from_linear
    assert_raises(ValueError, "1 features over 2 ranks.*at most 1 ranks", Row, 1, 4, comm=comm)
    assert_raises(ValueError, "1 features over 2 ranks", Column, 4, 1, comm=comm)
    message = "'all_reduce', 'reduce_scatter' or 'none', got 'sum'"
    assert_raises(ValueError, message, Row, 4, 4, comm=comm, reduce="sum")
    message = "once per rank; pass bias=False, or skip_bias_add"
    assert_raises(ValueError, message, Row, 4, 4, comm=comm, reduce="none")
    message = "got str; make one with Communicator.from_process_group"
    assert_raises(TypeError, message, Row, 4, 4, comm="gloo")
    assert_raises(TypeError, "must be an nn.Linear, got Conv1d", sharded, nn.Conv1d(1, 1, 1), comm)
    assert_raises(TypeError, "no in_features yet; call it once", sharded, nn.LazyLinear(4), comm)
    message = "multiple values for keyword argument 'dtype'"
    assert_raises(TypeError, message, sharded, nn.Linear(4, 4), comm, dtype=torch.float64)

    row, column = Row(5, 4, comm=comm), Column(5, 4, comm=comm)
    x, meta = torch.ones(2, 5), torch.ones(2, 3, device="meta")
    assert_raises(ValueError, r"rank 0 of 2 expects 3 .*\(2, 5\).*input_is_parallel=F", row, x)
    message = r"expects 5 features.*got a tensor of shape \(2, 3\)$"
    assert_raises(ValueError, message, column, x[:, :3])
    assert_raises(ValueError, r"shape \(\)", column, x[0, 0])
    assert_raises(RuntimeError, "dtype.*: double != float", row, x[:, :3].double())
    assert_raises(RuntimeError, "dtype.*Double and Float", column, x.double())
    assert_raises(ValueError, "is on cpu but its input on meta", row, meta)
    scatter = Row(5, 4, comm=comm, reduce="reduce_scatter")
    for shape in ((3, 3), (3,)):
        assert_raises(ValueError, "reduce_scatter.*pad", scatter, torch.ones(shape))


def test_layers_with_a_computed_weight_have_no_full_state() -> None:
    comm, _ = Communicator.threads(2)
    pruned = partial(prune.l1_unstructured, name="weight", amount=0.5)
    for change in (nn.utils.parametrizations.weight_norm, pruned):
        layer = ColumnParallelLinear(4, 6, comm=comm)
        change(layer)
        for call in (layer.full_state_dict, layer.reset_parameters):
            assert_raises(TypeError, "the weight of this .* is computed from", call)
        with pytest.raises(TypeError, match="is computed from"):
            full_state_dict(nn.Sequential(layer))


def test_inputs_of_a_subclass_keep_it_as_in_a_full_layer() -> None:
    class Image(Tensor):
        pass

    with Communicator.threads(1)[0] as comm:
        linear = nn.Linear(4, 3)
        layer = RowParallelLinear.from_linear(linear, comm)
        x = torch.randn(2, 4).as_subclass(Image)
        y, expected = layer(x), linear(x)
        assert type(y) is type(expected) is Image
        torch.testing.assert_close(y, expected)
        for result in (y, expected):
            result.square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, linear.weight.grad)
        torch.testing.assert_close(layer.bias.grad, linear.bias.grad)
