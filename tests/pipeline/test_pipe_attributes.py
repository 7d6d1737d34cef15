"""Attributes of a pipe, copies, and errors of bad arguments and inputs.

The attributes and errors are those that fairscale documents for its ``Pipe``.
"""

import copy
import pickle
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import normed_mlp as mlp
from support.pipes import on_cpus, pipe_of
from torch import nn

from pipekernels import NoChunk, Pipe, PipelineParallel, PipelineStage
from pipekernels.pipeline.partition import split_module

CPU, META = torch.device("cpu"), torch.device("meta")


def test_attributes_and_sequence_protocol() -> None:
    module = mlp()
    original = list(module)
    pipe = Pipe(module, [2, 3], devices=["cpu", "cpu", "cpu"], chunks=4, checkpoint="always")
    assert pipe.balance == [2, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert pipe.chunks == 4 and pipe.checkpoint == "always"
    assert [len(list(p.children())) for p in pipe.partitions] == [2, 3]
    assert len(pipe) == 5 and list(pipe) == original
    assert pipe[0] is original[0] and pipe[-1] is original[-1]
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            pipe[index]
    assert type(pipe[1:3]) is nn.Sequential and list(pipe[1:3].children()) == original[1:3]
    assert list(pipe[1:3]._modules) == ["1", "2"]
    with pytest.raises(TypeError, match="'str' object"):
        pipe["0"]


def test_state_dict_has_the_modules_keys_after_a_prefix() -> None:
    module = mlp()
    keys = list(module.state_dict())
    pipe = on_cpus(module, [2, 3])
    assert [key.split(".", 2)[2] for key in pipe.state_dict()] == keys
    again = pipe.to_sequential()
    assert list(again.state_dict()) == keys and list(again) == list(pipe)


def test_a_pipe_without_layers_returns_its_input() -> None:
    for pipe in (Pipe(nn.Sequential()), Pipe(nn.Sequential(), [], devices=["cpu"], chunks=4)):
        assert (len(pipe), pipe.balance, pipe.devices) == (0, [], [])
        x = torch.ones(3, 2)
        for given in (x, (x, x)):
            assert copy.deepcopy(pipe)(given) is given
        with pytest.raises(TypeError, match="input must be a tensor"):
            pipe("text")
        with pytest.raises(RuntimeError, match="no layers, so there is nothing to train"):
            pipe.train_step(x, None, torch.sum)
        assert pipe.state_dict() == {} and len(pipe.to_sequential()) == 0


class Mode(Enum):
    ALWAYS = "always"

    def __str__(self) -> str:
        return self.value


class NamedMode(str, Enum):
    NEVER = "never"


@pytest.mark.parametrize("chunks", [4.0, np.int64(4), np.float32(4), Fraction(4), torch.tensor(4)])
@pytest.mark.parametrize("checkpoint", [Mode.ALWAYS, NamedMode.NEVER])
def test_whole_numbers_and_modes_of_other_types(chunks: Any, checkpoint: Any) -> None:
    """Accepted, as by fairscale's Pipe, which calls int() and str()."""
    pipe = on_cpus(mlp(), [2, 3], chunks=chunks, checkpoint=checkpoint)
    assert (type(pipe.chunks), pipe.chunks) == (int, 4)
    assert (type(pipe.checkpoint), pipe.checkpoint) == (str, checkpoint.value)


@pytest.mark.parametrize("training", [True, False])
def test_layers_keep_their_modes(training: bool) -> None:
    """One layer may be in another mode than the rest, as a frozen BatchNorm."""
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    module = nn.Sequential(*layers).train(training)
    for layer in (module[1], module[2][1]):
        layer.train(not training)
    modes = [layer.training for layer in module.modules()]
    pipe = on_cpus(module, [1, 2], chunks=2)
    again = pipe.to_sequential()
    assert [layer.training for layer in again.modules()] == modes
    assert [m.training for m in (pipe, *pipe.partitions)] == [training] * 3
    stages = [PipelineStage(i).add_layer(layer).train(training) for i, layer in enumerate(layers)]
    for layer in (module[1], module[2][1]):
        layer.train(not training)
    pipe = PipelineParallel(stages, 2)
    assert [layer.training for layer in pipe.to_sequential().modules()] == modes


def test_balance_and_devices_by_default() -> None:
    pipe = Pipe(mlp(), chunks=2)
    assert sum(pipe.balance) == 5 and len(pipe.devices) == len(pipe.balance)
    if not torch.cuda.is_available():
        assert len(pipe.balance) == min(5, torch.get_num_threads())
    module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10))
    assert Pipe(module, devices=["cpu"] * 2).balance == [1, 3]  # It goes by parameters.


def test_moving_is_refused_and_casting_allowed() -> None:
    pipe = on_cpus(mlp(), [2, 3])
    x = torch.zeros(1)
    for move in (
        pipe.cuda, pipe.cpu, lambda: pipe.to("cpu"), lambda: pipe.to(torch.device("cpu")),
        lambda: pipe.to(device="cpu"), lambda: pipe.to(0), lambda: pipe.to(x),
        lambda: pipe.to(tensor=x), lambda: pipe.to_empty(device="cpu"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"cannot be moved.*device_placement=\[False\]"):
            move()
    before = pipe(torch.randn(3, 6, dtype=torch.float64))
    assert pipe.to(torch.float32) is pipe
    after = pipe(torch.randn(3, 6))
    assert (before.dtype, after.dtype) == (torch.float64, torch.float32)
    after.sum().backward()
    assert pipe[0].weight.grad.dtype == torch.float32
    model = nn.ModuleDict({"pipe": pipe, "head": nn.Linear(6, 2)})
    with pytest.raises(TypeError, match="cannot be moved"):
        model.to("meta")
    assert pipe.devices == [p.device for p in (pipe[0].weight, pipe[2].weight)]


def test_deepcopy_and_pickle() -> None:
    pipe = on_cpus(mlp(), [2, 3], chunks=2)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = pipe(x)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(other(x), expected)
        other(x).sum().backward()
        assert other[0].weight is not pipe[0].weight
    assert pipe[0].weight.grad is None


class Residual(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


WITH_SCALE, WITH_HOOK = mlp(), mlp()
WITH_SCALE.register_buffer("scale", torch.ones(1))
WITH_HOOK.register_forward_hook(lambda module, inputs, output: output * 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"module": nn.Linear(1, 1)}, TypeError, r"Sequential, not Linear;.*tensor_parallelize"),
        ({"module": Residual(nn.Tanh())}, TypeError, "the Residual has its own forward"),
        ({"module": WITH_SCALE}, TypeError, "has its own forward, parameters, buffers or"),
        ({"module": WITH_HOOK}, TypeError, "the Sequential has its own .* or hooks"),
        ({"chunks": 0}, ValueError, "chunks is 0"),
        ({"chunks": 1.5}, ValueError, "chunks is 1.5"),
        ({"batch_dim": -1}, ValueError, "batch_dim is -1; it must be an integer of at least 0"),
        ({"checkpoint": "sometimes"}, ValueError, "always, except_last, never"),
        ({"balance": [5, 0]}, ValueError, "at least one layer"),
        ({"module": nn.Sequential(), "balance": [1]}, ValueError, "the module has 0"),
        ({"chunks": float("nan")}, ValueError, "chunks is nan"),
        ({"balance": 5}, TypeError, "balance is 5; it must be a list with an entry per stage"),
        ({"balance": [2.0, 3.0]}, TypeError, "an entry of balance must be an int, got float"),
        ({"devices": ["cpu"]}, IndexError, "1 devices for 2 partitions"),
        ({"devices": "cpu"}, TypeError, "devices is 'cpu'; it must be a list"),
        ({"devices": ["cpu", None]}, TypeError, r"device\(\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"module": mlp(), "balance": [2, 3], "devices": ["cpu", "cpu"]}
    with pytest.raises(error, match=message):
        Pipe(**{**good, **arguments})


def test_bad_inputs() -> None:
    """Without a tensor they raise a TypeError, as in fairscale's Pipe."""
    pipe = on_cpus(mlp(), [2, 3])
    bad: Any
    for bad in ("text", 3, [], (), {"x": 1}, None, NoChunk(torch.zeros(1))):
        with pytest.raises(TypeError, match="input must be a tensor or a"):
            pipe(bad)
    with pytest.raises(TypeError, match="input must be a tensor or a .* not arguments without one"):
        pipe()
    with pytest.raises(ValueError, match="no dimension"):
        pipe(torch.tensor(1.0))
    with pytest.raises(ValueError, match="input 0 has no dimension"):
        pipe.train_step(torch.tensor(1.0), None, torch.sum)


def test_a_stage_that_returns_no_tensor(place: torch.device) -> None:
    pipe = pipe_of(nn.Identity(), FunctionLayer(lambda x: [len(x)]), nn.Identity(), device=place)
    with pytest.raises(TypeError, match="output of stage 1 must be a tensor.*not list"):
        pipe(torch.zeros(4, 2))


def test_layers_may_be_replaced_but_not_partitions() -> None:
    pipe = on_cpus(mlp(), [2, 3])
    x = torch.zeros(4, 6, dtype=torch.float64)
    pipe.partitions[1][2] = nn.Linear(6, 1).double()
    assert pipe(x).shape == (4, 1)
    pipe.partitions[1] = nn.Sequential(pipe.partitions[1])
    with pytest.raises(RuntimeError, match=r"replaced, and the pipe would run the former one"):
        pipe(x)
    with pytest.raises(RuntimeError, match=r"replace layers in it instead"):
        pipe.train_step(x, x, nn.functional.mse_loss)
    assert copy.deepcopy(pipe)(x).shape == (4, 1)


def test_what_stages_on_different_devices_share() -> None:
    """Parameters and modules are refused; a buffer is copied."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    with pytest.raises(ValueError, match="shared by stages on cpu and meta"):
        split_module(nn.Sequential(a, b), [1, 1], [CPU, META])

    norm = nn.BatchNorm1d(2, affine=False)
    module = nn.Sequential(norm, nn.Linear(2, 2), nn.Sequential(norm))
    with pytest.raises(ValueError, match=r"module '2\.0' is shared by stages on cpu and meta"):
        split_module(module, [2, 1], [CPU, META])
    assert len(split_module(module, [2, 1], [CPU] * 2)) == 2

    module = nn.Sequential(*(nn.BatchNorm1d(2, affine=False) for _ in range(2)))
    module[1].running_mean = module[0].running_mean
    first, second = split_module(module, [1, 1], [CPU, META])
    assert [norm.running_mean.device for norm in (first[0], second[0])] == [CPU, META]
