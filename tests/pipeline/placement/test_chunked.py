"""``parallelize_pipeline`` with chunks: the forward of any module, by micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.function_layer import FunctionLayer
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from pipekernels import NoChunk, Pipe, parallelize_pipeline
from pipekernels.batchnorm import convert_deferred_batch_norm
from pipekernels.local_ops.micro_batch import micro_batch_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6


def chunked(module: nn.Module, chunks: int) -> nn.Module:
    return parallelize_pipeline(module, {"": "cpu"}, chunks=chunks)


@dataclass
class Output:
    hidden: torch.Tensor
    pair: tuple[torch.Tensor, torch.Tensor]
    name: str
    loss: None = None


def test_arguments_and_results_of_all_kinds() -> None:
    """Nested ones, a tensor of one row, and a result with several rows for each of the input."""

    def forward(inputs: dict, scale: torch.Tensor, *, bias: list) -> Output:
        left, right = (inputs["x"] * scale + bias[0]).chunk(2, dim=1)
        return Output(left.tanh(), (left, right.repeat_interleave(3, dim=0)), "model")

    x, scale, bias = (torch.randn(rows, WIDTH, requires_grad=True) for rows in (7, 1, 7))
    found, expected = (
        call({"x": x}, scale, bias=[bias]) for call in (chunked(FunctionLayer(forward), 3), forward)
    )
    assert (found.name, found.loss) == ("model", None)
    results, wanted = ([output.hidden, *output.pair] for output in (found, expected))
    torch.testing.assert_close(results, wanted, rtol=0, atol=0)
    grads, expected_grads = (
        torch.autograd.grad(sum(t.square().sum() for t in outputs), [x, scale, bias])
        for outputs in (results, wanted)
    )
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize(("batch", "chunks"), [(5, 4), (3, 8), (1, 2), (8, 8), (0, 3)])
def test_sizes_of_micro_batches(batch: int, chunks: int) -> None:
    sizes: list[int] = []
    model = chunked(FunctionLayer(lambda x: (sizes.append(len(x)), x + 1)[1]), chunks)
    assert torch.equal(model(torch.zeros(batch, 2)), torch.ones(batch, 2))
    assert sizes == micro_batch_sizes(batch, chunks)


def test_devices_can_work_at_the_same_time() -> None:
    """If devices run tasks of one unit in the order of issue, the makespan is that of GPipe.

    That is micro-batches + stages - 1 units each for forward and backward.
    """
    stages, chunks = 3, 5
    model = chunked(nn.Sequential(*[nn.Linear(2, 2) for _ in range(stages)]), chunks)
    order: dict[str, list[int]] = {"forward": [], "backward": []}
    for s, stage in enumerate(model):
        stage.register_forward_hook(lambda *_, s=s: order["forward"].append(s))
        stage.register_full_backward_hook(lambda *_, s=s: order["backward"].append(stages - 1 - s))
    model(torch.randn(chunks, 2, requires_grad=True)).sum().backward()
    for issued in order.values():
        done: list[list[int]] = [[] for _ in range(stages)]  # Per device, the end of each task.
        for s in issued:
            received = done[s - 1][len(done[s])] if s else 0
            done[s].append(max(received, done[s][-1] if done[s] else 0) + 1)
        assert [len(d) for d in done] == [chunks] * stages
        assert max(map(max, done)) == chunks + stages - 1


def test_a_tensor_passed_twice_is_one_object_in_each_micro_batch() -> None:
    seen: list[bool] = []
    model = chunked(FunctionLayer(lambda q, k: (seen.append(q is k), q)[1]), 2)
    x = torch.ones(4, 1)
    model(x, x)
    assert seen == [True, True]


def test_arguments_without_the_batch_dimension_are_not_split() -> None:
    """They are the same objects in every call, so the model can append to the caller's list."""
    seen: list[tuple[Any, ...]] = []
    model = chunked(FunctionLayer(lambda scalar, x, *rest: (seen.append((scalar, *rest)), x)[1]), 2)
    rest = (torch.tensor(2.0), torch.ones(3, 4), torch.ones(1, 4, 4), [1], "text", None)
    model(rest[0], torch.ones(4, 1), *rest[1:])
    assert len(seen) == 2
    assert all(a is b for args in seen for a, b in zip(args, rest, strict=True))


@pytest.mark.parametrize("args", [(), (torch.tensor(1.0), 2), (torch.ones(1, 2), object)])
def test_one_call_may_take_and_return_anything(args: tuple[Any, ...]) -> None:
    assert chunked(FunctionLayer(lambda *args: args), 4)(*args) == args


def test_an_object_that_all_micro_batches_return_is_returned_once() -> None:
    table = nn.Parameter(torch.ones(6, 2))
    model = chunked(FunctionLayer(lambda x: {"x": x, "table": table, "kind": ("k", 1.5)}), 3)
    output = model(torch.zeros(6, 2))
    assert output["table"] is table and output["kind"] == ("k", 1.5)
    assert output["x"].shape == (6, 2)


class Layer:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None


class Cache:
    """A plain object that a model fills and reads, as Hugging Face's caches."""

    def __init__(self) -> None:
        self.layers = [Layer()]

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], dim=1)
        return layer.keys.sum(1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.mean(), "type Tensor at the same place.*as in a loss"),
        (lambda x: x[:1], r"module returned a tensor of shape \(1, 4\) .* 0, of 3 rows"),
        (lambda x: x[:, : len(x)], r"of shape \(2, 2\) for micro-batch 1, of 2 rows"),
        (lambda x: len(x), "type int at the same place"),
        (lambda x: (x, Cache()), "type Cache at the same place.*use_cache=False"),
        (lambda x: {"a": object()}, "type object at the same place"),
        (lambda x: {len(x)}, "type set at the same place"),
        (lambda x: x if len(x) == 3 else None, "type NoneType, Tensor"),
        (lambda x: None if len(x) == 3 else x, "type NoneType, Tensor"),
        (lambda x: [x] * len(x), r"returned \[3, 2\] values for its micro-batches"),
        (lambda x: {str(len(x)): x}, "put them together in another way.* with the same keys"),
        (lambda x: (x,) if len(x) == 3 else [x], "put them together in another way"),
    ],
)
def test_results_that_cannot_be_joined(function: Callable[..., Any], message: str) -> None:
    model = chunked(FunctionLayer(function), 2)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(5, 4))


class Columns(dict):
    """A subclass of dict, as data loaders return."""


def test_dicts_of_any_class_are_split_and_joined() -> None:
    model = chunked(FunctionLayer(lambda columns: Columns(y=columns["x"] * columns["w"])), 2)
    x, w = torch.randn(5, 2), torch.randn(5, 1)
    output = model(Columns(x=x, w=w))
    assert type(output) is Columns and torch.equal(output["y"], x * w)


@pytest.mark.parametrize("kind", ["empty Cache", "filled Cache", "PackedSequence"])
def test_an_argument_that_cannot_be_split(kind: str) -> None:
    model = chunked(FunctionLayer(lambda x, cache: cache.update(x)), 2)
    cache, x = Cache(), torch.ones(4, 3)
    if kind == "filled Cache":
        cache.update(x)
    given = pack_sequence([x[0], x[1]]) if kind == "PackedSequence" else cache
    message = f"type {kind.split()[-1]} cannot be split into micro-batches.*chunks=1"
    with pytest.raises(TypeError, match=message):
        model(x, cache=given)
    assert torch.equal(model(x[:1], cache=Cache()), x[:1].sum(1))


def test_objects_without_tensors_are_passed_to_every_micro_batch() -> None:
    class Options:
        scale, names, layer = 2.0, ("a",), nn.Linear(1, 1)

        def __init__(self) -> None:
            self.function, self.kind, self.itself = len, Cache, self

    options = Options()
    model = chunked(FunctionLayer(lambda x, o: x * o.scale), 2)
    assert torch.equal(model(torch.ones(4, 3), options), torch.full((4, 3), 2.0))


def test_keyword_arguments_are_ordered_as_the_parameters() -> None:
    """The first tensor defines the batch, which must not depend on the order of the caller."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    x, mask = torch.randn(4, 3), torch.randn(3)
    model = chunked(Masked(), 2)
    assert torch.equal(model(mask=mask, x=x), x * mask)
    # Keyword arguments without parameters have no order.
    named = chunked(FunctionLayer(lambda **named: named["x"] * named["mask"]), 2)
    assert torch.equal(named(x=x, mask=mask), x * mask)


def test_an_input_that_needs_a_gradient_must_not_be_modified_in_place() -> None:
    model = chunked(nn.ReLU(inplace=True), 2)
    x = torch.ones(4, 2, requires_grad=True) * 1.0
    with pytest.raises(RuntimeError, match="inplace"):
        model(x)
    y = torch.tensor([[-1.0], [2.0]])
    model(y)
    assert torch.equal(y, torch.tensor([[0.0], [2.0]]))


def test_second_derivatives() -> None:
    model = chunked(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).double(), 2)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(model, (x,))


def test_an_exception_of_a_micro_batch_is_raised_and_the_model_stays_usable() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise KeyError("the second micro-batch")
        return x

    layers = nn.Sequential(FunctionLayer(check), nn.BatchNorm1d(2))
    model = chunked(convert_deferred_batch_norm(layers), 2)
    bad = torch.ones(4, 2)
    bad[3] = torch.nan
    with pytest.raises(KeyError, match="second micro-batch"):
        model(bad)
    assert model[1].num_batches_tracked == 0
    model(torch.ones(4, 2))
    assert model[1].num_batches_tracked == 1
    torch.testing.assert_close(model[1].running_mean, torch.full((2,), 0.1))


@pytest.mark.compile
@pytest.mark.skipif(
    torch.__version__ < (2, 7),
    reason="torch 2.6 does not compile context managers written as generators",
)
def test_compiles_as_one_graph() -> None:
    model = chunked(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)
    x = torch.randn(4, 2)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_tensor_in_no_chunk_stays_whole(chunks: int) -> None:
    model = FunctionLayer(lambda x, weights: x * weights.sum())
    x, weights = torch.randn(6, 2), torch.rand(6)
    expected = model(x, weights)
    parallelize_pipeline(model, {"": "cpu"}, chunks=chunks)
    assert torch.equal(model(x, NoChunk(weights)), expected)
    assert torch.equal(model(x[:1], NoChunk(weights)), expected[:1])  # One micro-batch.


@pytest.mark.parametrize("kind", ["encoder", "lstm"])
def test_sequence_first_models(kind: str) -> None:
    def build() -> nn.Module:
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        first = FunctionLayer(lambda y: y[0] if isinstance(y, tuple) else y)
        inner = encoder if kind == "encoder" else nn.LSTM(8, 8)
        return nn.Sequential(inner, first, nn.Linear(8, 3))

    torch.manual_seed(0)
    model = build().double()
    x = torch.randn(6, 4, 8, dtype=torch.float64)  # [time, batch, features]
    expected = model(x)
    parallelize_pipeline(model, {"": "cpu", "0": "cpu"}, chunks=2, batch_dim=1)
    torch.testing.assert_close(model(x), expected)
    with pytest.warns(UserWarning, match=r"batch_first=False.*give batch_dim=1"):
        chunked(build(), 2)
    with pytest.warns(UserWarning, match="LSTM has batch_first=False"):
        Pipe(nn.Sequential(nn.LSTM(8, 8)), [1], devices=["cpu"], chunks=2)
