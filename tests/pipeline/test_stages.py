"""Pipelines of stage objects.

The interface is that of Rust's generic ``PipelineParallel<B: Backend>`` (stages to which layers are
added one by one, GPipe's microbatches), with extensions.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.pipes import outcome
from torch import nn

import pipekernels
from pipekernels import PipelineParallel, PipelineStage


def stages() -> list[PipelineStage]:
    torch.manual_seed(4)
    return [
        PipelineStage(0).add_layer(nn.Linear(6, 5).double()).add_layer(nn.Tanh()),
        PipelineStage(1).add_layer(nn.Linear(5, 4).double()),
        PipelineStage(2).add_layer(nn.LayerNorm(4).double()).add_layer(nn.Linear(4, 3).double()),
    ]


def batch(size: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(size)
    x = torch.randn(size, 6, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(torch.get_default_device())


def test_equals_the_stages_as_a_sequential() -> None:
    reference = nn.Sequential(*stages())
    for num_micro_batches in (1, 3, 20):
        pipeline = PipelineParallel(stages(), num_micro_batches)
        found, expected = (outcome(each, batch(7)) for each in (pipeline, reference))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_stages_are_ordered_by_index() -> None:
    a, b, c = stages()
    pipeline = PipelineParallel(iter([c, a, b]), 2)
    assert torch.equal(pipeline(batch(4)), PipelineParallel([a, b, c], 2)(batch(4)))
    assert pipeline.num_stages() == 3 and isinstance(pipeline, pipekernels.Pipe)
    assert (pipeline.balance, pipeline.chunks) == ([2, 1, 2], 2)
    assert [pipeline.stage(i) for i in range(-1, 4)] == [None, a, b, c, None]
    assert [stage.index for stage in (a, b, c)] == [0, 1, 2]


def test_a_stage_is_a_module() -> None:
    stage = PipelineStage(3).add_layer(nn.Linear(2, 2)).add_layer(nn.ReLU())
    assert len(stage.layers) == 2 and stage.index == 3
    x = torch.randn(4, 2)
    assert torch.equal(stage(x), stage.layers[0](x).relu())
    assert "PipelineStage(\n  index=3\n" in repr(stage)
    assert PipelineStage(0)(x) is x
    given = [PipelineStage(0), PipelineStage(1).add_layer(nn.Linear(6, 2)), PipelineStage(2)]
    assert PipelineParallel(given, 2)(torch.ones(4, 6)).shape == (4, 2)


def test_stages_run_where_their_layers_are() -> None:
    def on(index: int, *layers: nn.Module) -> PipelineStage:
        stage = PipelineStage(index)
        for layer in layers:
            stage.add_layer(layer)
        return stage

    def linear(device: str) -> nn.Linear:
        return nn.Linear(2, 2, device=device)

    given = [on(0, nn.ReLU()), on(1, linear("cpu")), on(2, linear("meta")), on(3, nn.Tanh())]
    pipeline = PipelineParallel(given, 2)
    assert [device.type for device in pipeline.devices] == ["cpu", "cpu", "meta", "meta"]
    assert [d.type for d in PipelineParallel([on(0, nn.ReLU())], 2).devices] == ["cpu"]
    with pytest.raises(ValueError, match="layers of stage 0 are on cpu, meta; move the stage"):
        PipelineParallel([on(0, linear("cpu"), linear("meta"))], 2)


def test_a_pipeline_has_the_layers_that_stages_had() -> None:
    given = stages()
    pipeline = PipelineParallel(given, 2)
    expected = pipeline(batch(4))
    given[1].add_layer(nn.Tanh())
    torch.testing.assert_close(pipeline(batch(4)), expected)
    pipeline.partitions[1][0] = layer = nn.Linear(5, 4).double()
    pipeline(batch(4)).sum().backward()
    assert layer.weight.grad is not None
    hook(given[2])
    with pytest.raises(TypeError, match="has its own forward, parameters, modules or hooks"):
        PipelineParallel(given, 2)


@pytest.mark.parametrize(
    ("indices", "num_micro_batches", "message"),
    [
        ([], 2, "no stage; a pipeline needs at least one"),
        ([0], 0, "num_micro_batches is 0; it must be an integer of at least 1"),
        ([0], True, "num_micro_batches is True"),
        ([0, 1, 1], 2, r"indices are \[0, 1, 1\]; they must be 0 to 2, each once"),
        ([2, 0], 2, r"indices are \[0, 2\]; they must be 0 to 1, each once"),
    ],
)
def test_bad_pipelines(indices: list[int], num_micro_batches: Any, message: str) -> None:
    given = [PipelineStage(i).add_layer(nn.Linear(2, 2)) for i in indices]
    with pytest.raises(ValueError, match=message):
        PipelineParallel(given, num_micro_batches)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize(
    "change",
    [
        hook,
        lambda stage: hook(stage.layers),
        lambda stage: stage.register_parameter("scale", nn.Parameter(torch.ones(()))),
        lambda stage: stage.add_module("more", nn.Linear(2, 2)),
    ],
)
def test_behaviour_outside_of_layers_is_refused(change: Callable[[PipelineStage], None]) -> None:
    stage = PipelineStage(0).add_layer(nn.Linear(2, 2))
    change(stage)
    with pytest.raises(TypeError, match="its own"):
        PipelineParallel([stage], 2)
    doubling = type("Doubling", (PipelineStage,), {"forward": lambda self, x: 2 * x})
    with pytest.raises(TypeError, match="stage 0 has its own forward"):
        PipelineParallel([doubling(0)], 2)


def test_arguments_of_other_types() -> None:
    wrong: list[Any] = [nn.functional.relu, None, "Linear"]
    for bad in wrong:
        with pytest.raises(TypeError, match="layer must be an nn.Module, got "):
            PipelineStage(0).add_layer(bad)
    indices: list[Any] = [-1, 1.0, True, "0"]
    for index in indices:
        with pytest.raises(ValueError, match=f"index is {index!r}; it must be"):
            PipelineStage(index)
    with pytest.raises(TypeError, match=r"stages\[1\] must be a PipelineStage, got Linear"):
        PipelineParallel([PipelineStage(0), cast(Any, nn.Linear(1, 1))], 2)
