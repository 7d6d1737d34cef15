"""Values that may enter a pipe, travel between its layers, and leave it."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import assert_same_gradients, pipe_of
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from pipekernels import NoChunk, Pipe, register_split
from pipekernels.pipeline import nested as structure


def test_only_a_keyword_argument_and_a_list(place: torch.device) -> None:
    pipe = pipe_of(nn.Linear(4, 2), nn.Tanh(), device=place)
    x = torch.randn(4, 4)
    assert torch.equal(pipe(input=x), pipe(x))

    pipe = pipe_of(FunctionLayer(sum), nn.Identity(), device=place)
    assert torch.equal(pipe([x, x, x]), 3 * x)


def test_targets_are_cut_along_the_batch_dimension(place: torch.device) -> None:
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    piped = copy.deepcopy(plain)
    pipe = Pipe(piped, [2, 1], devices=[place] * 2, chunks=3, batch_dim=1)
    x, weights = torch.randn(2, 2, 7, 4, 5, dtype=torch.float64)
    (plain(x) * weights).sum().backward()
    pipe.train_step(x, weights, lambda y, w: (y * w).sum(), loss_reduction="sum")
    assert_same_gradients(piped, plain)


def test_bad_values() -> None:
    x = torch.zeros(4, 4)
    pipe = pipe_of(nn.Identity(), nn.Identity())
    with pytest.raises(ValueError, match=r"input 1 has batch size 3 and input 0 has 4.*NoChunk"):
        pipe((x, torch.zeros(3)))
    with pytest.raises(ValueError, match="requires no gradient"):
        NoChunk(torch.zeros(2, requires_grad=True))
    with pytest.raises(TypeError, match="takes a tensor, not int"):
        NoChunk(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch dimension 2 is needed"):
        pipe_of(nn.Identity(), batch_dim=2)(x)


class Batch(dict[str, Any]):
    """A dict of a class of its own."""


@dataclasses.dataclass
class Options:
    scale: Any


def test_tensors_in_containers_that_pytree_does_not_know() -> None:
    """Every microbatch would get them whole, and their graphs would not be cut between stages."""

    pipe = pipe_of(nn.Identity(), FunctionLayer(lambda x: (x, Batch(x=x * 2))))
    x = torch.randn(4, 2, requires_grad=True)
    with pytest.raises(TypeError, match=r"input has tensors in a Batch, which.*register"):
        pipe(x, Batch(x=x))
    with pytest.raises(TypeError, match="the output of stage 1 has tensors in a Batch"):
        pipe(x)
    scaled = pipe_of(FunctionLayer(lambda x, options: x * options.scale), nn.Identity())
    assert torch.equal(scaled(x, Options(2.0)), x * 2)
    with pytest.raises(TypeError, match="input has tensors in a Options"):
        scaled(x, Options(Batch(x=[x])))


def test_micro_batches_with_outputs_of_different_structure(place: torch.device) -> None:
    odd = FunctionLayer(lambda x: (x, x) if x[0, 0] else {"x": x})
    pipe = pipe_of(nn.Identity(), odd, device=place)
    with pytest.raises(ValueError, match="all microbatches must return the same structure"):
        pipe(torch.tensor([[0.0], [1.0]]))


@pytest.mark.parametrize("batch", [8, 7])
def test_a_multiple_of_the_rows_is_joined(batch: int, place: torch.device) -> None:
    x = torch.randn(batch, 3, 2)
    pipe = pipe_of(nn.Flatten(0, 1), device=place, chunks=4)
    assert torch.equal(pipe(x), x.flatten(0, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0, keepdim=True),
        lambda x: x[x[:, 0] > 0],
        lambda x: x[:, : int(x[0, 1])],
    ],
    ids=["reduced", "filtered", "other features"],
)
def test_other_rows_or_features_are_refused(function: Callable[[Any], Any]) -> None:
    """A single microbatch returns them as they are, and other values too."""
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="joined along dimension 0"):
        pipe_of(FunctionLayer(function))(x)
    pipe = pipe_of(FunctionLayer(lambda x: (function(x), x.mean(), "name", None)), chunks=1)
    output, mean, *others = pipe(x)
    assert output.equal(function(x)) and mean.equal(x.mean()) and others == [["name"], None]
    with pytest.raises(ValueError, match=r"\(1, 4, 32\) for microbatch 0, of 4 rows"):
        pipe_of(nn.LSTM(8, 32, batch_first=True), chunks=4)(torch.randn(16, 5, 8))


@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_rows_that_cannot_be_cut(kind: str) -> None:
    x: Any = torch.eye(4).to_sparse()
    if kind == "jagged":
        x = torch.nested.nested_tensor(
            [torch.ones(n + 1, 4) for n in range(4)], layout=torch.jagged
        )

    dense = torch.Tensor.to_dense if kind == "sparse" else lambda x: x.to_padded_tensor(0.0)
    pipe = pipe_of(FunctionLayer(dense))
    with pytest.raises(TypeError, match=rf"input 0.*{kind}.*NoChunk\(tensor\)\), or use chunks=1"):
        pipe(x)
    with pytest.raises(TypeError, match=f"target 0.*{kind}"):
        pipe.train_step(torch.ones(4, 4), x, lambda y, t: y.sum())
    pipe.chunks = 1
    assert pipe(x).shape[0] == 4
    with pytest.raises(ValueError, match="all tensors are split together"):
        pipe_of(nn.Identity())(pack_sequence([torch.ones(2, 3), torch.ones(2, 3)]))


class Images(list[Any]):
    """Of different sizes."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """PackedSequences and images are cut during the test."""
    monkeypatch.setattr(structure, "_splits", {})

    def packed(value: Any, sizes: Sequence[int]) -> list[Any]:
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        pairs = zip(padded.split(list(sizes)), lengths.split(list(sizes)), strict=True)
        return [
            pack_padded_sequence(rows, own, batch_first=True, enforce_sorted=False)
            for rows, own in pairs
        ]

    def images(value: Images, sizes: Sequence[int]) -> list[Images]:
        rest = iter(value)
        return [Images(next(rest) for _ in range(size)) for size in sizes]

    register_split(PackedSequence, packed)
    register_split(Images, images)


@pytest.mark.usefixtures("registered")
def test_values_of_registered_classes_are_cut(tasks: str) -> None:
    class First(nn.LSTM):
        def forward(self, packed: PackedSequence, images: Images, scale: torch.Tensor) -> Any:
            _, (hidden, _) = super().forward(packed)
            means = torch.stack([image.mean() for image in images])
            return hidden[0] * (means * scale).unsqueeze(1)

    torch.manual_seed(0)
    rows = [torch.randn(n, 3) for n in (2, 5, 1, 3, 4)]
    packed = pack_sequence(rows, enforce_sorted=False)
    images = Images(torch.randn(3, n + 1, 2) for n in range(5))
    scale, target = torch.linspace(1, 2, 5), torch.randn(5, 4)
    module = nn.Sequential(First(3, 4, batch_first=True), nn.Linear(4, 4))
    expected = module[1](module[0](packed, images, scale))
    pipe = Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=3)
    torch.testing.assert_close(pipe(packed, images, scale), expected)

    def loss(output: torch.Tensor, wanted: Any) -> torch.Tensor:
        assert len(wanted[1]) == len(output)
        return (output - wanted[0]).square().mean()

    found = pipe.train_step((packed, images, scale), (target, images), loss)
    torch.testing.assert_close(found, (expected - target).square().mean().detach())


@pytest.mark.usefixtures("registered")
def test_what_is_cut_into_another_number_of_parts() -> None:
    register_split(Images, lambda value, sizes: [value])
    pipe = pipe_of(nn.Identity())
    with pytest.raises(ValueError, match=r"cuts a Images returned 1 parts for 2 microbatches"):
        pipe((torch.ones(4, 1), Images()))
    for kind in (list, torch.Tensor, nn.Parameter, 3):
        with pytest.raises(TypeError, match="it must be a separate class"):
            register_split(kind, lambda value, sizes: [value])  # type: ignore[arg-type]
