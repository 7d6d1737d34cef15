"""Pipelines built from stage objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipekernels._arguments import check_kind, integer
from pipekernels.pipeline.context import Mode
from pipekernels.pipeline.partition import check_sequential, does_more
from pipekernels.pipeline.pipe import Pipe


class PipelineStage(nn.Module):
    """One stage of a :class:`PipelineParallel`: layers that run one after another on one device.

    Args:
        index: the stage's position in the pipeline, from 0; a ValueError for anything else.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = integer("index", index, least=0)
        self.layers = nn.Sequential()

    def add_layer(self, layer: nn.Module) -> PipelineStage:
        """Append ``layer``, which takes what the layer before it returns; returns the stage. A
        TypeError if it is not a module."""
        check_kind("layer", layer, nn.Module, "an nn.Module")
        self.layers.append(layer)
        return self

    def forward(self, input: Any) -> Any:
        """Run the layers; without any, ``input`` itself is returned."""
        return self.layers(input)

    def extra_repr(self) -> str:
        return f"index={self.index}"


class PipelineParallel(Pipe):
    """Runs stages over microbatches: a :class:`Pipe` made of stage objects (:doc:`/guides/pipe`).

    Each stage runs on the device of its layers; a stage without parameters and buffers runs on that
    of the previous stage or, if no earlier stage has any, of the first stage that has some.

    Args:
        stages: in any order; their indices are 0 to n - 1. The layers that they have now run:
            add or replace others in ``partitions``.
        num_micro_batches: the most microbatches per input.
        checkpoint: see ``Pipe``.

    Raises:
        TypeError: a stage is not a :class:`PipelineStage`, or has more than its layers, such as
            hooks.
        ValueError: no stage, an index that occurs twice or is left out, ``num_micro_batches`` below
            1, a stage whose layers are on several devices, or an unknown ``checkpoint``.
    """

    def __init__(
        self,
        stages: Iterable[PipelineStage],
        num_micro_batches: int,
        *,
        checkpoint: Mode = "never",
    ) -> None:
        ordered = _in_order(stages)
        chunks = integer("num_micro_batches", num_micro_batches)
        layers = [_layers_of(stage) or [nn.Identity()] for stage in ordered]
        module = nn.Sequential(*chain.from_iterable(layers))
        module.training = any(stage.training for stage in ordered)
        super().__init__(
            module,
            [len(own) for own in layers],
            devices=_devices(ordered),
            chunks=chunks,
            checkpoint=checkpoint,
        )
        # Tuples, so that they are not registered as submodules, which the partitions' layers are.
        self._stages = tuple(ordered)

    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._stages)

    def stage(self, index: int) -> PipelineStage | None:
        """The stage with that index, or None."""
        return self._stages[index] if 0 <= index < len(self._stages) else None


def _in_order(stages: Iterable[PipelineStage]) -> list[PipelineStage]:
    stages = list(stages)
    for position, stage in enumerate(stages):
        check_kind(f"stages[{position}]", stage, PipelineStage, "a PipelineStage")
    if not stages:
        raise ValueError("there is no stage; a pipeline needs at least one")
    ordered = sorted(stages, key=lambda stage: stage.index)
    indices = [stage.index for stage in ordered]
    if indices != list(range(len(ordered))):
        raise ValueError(
            f"the stages' indices are {indices}; they must be 0 to {len(ordered) - 1}, each once"
        )
    return ordered


def _layers_of(stage: PipelineStage) -> list[nn.Module]:
    """The layers of ``stage``; a TypeError if it does more than call them."""
    check_sequential(stage.layers)
    if does_more(stage, PipelineStage) or len(stage._modules) > 1:
        raise TypeError(
            f"stage {stage.index} has its own forward, parameters, modules or hooks, and the "
            "pipeline runs its layers alone; make a layer of them, stage.add_layer(module)"
        )
    return list(stage.layers)


def _devices(stages: Sequence[PipelineStage]) -> list[torch.device]:
    """The device of each stage: of its tensors, or else of the stage before."""
    own = [{tensor.device for tensor in chain(s.parameters(), s.buffers())} for s in stages]
    for stage, devices in zip(stages, own, strict=True):
        if len(devices) > 1:
            raise ValueError(
                f"the layers of stage {stage.index} are on {', '.join(sorted(map(str, devices)))}; "
                "move the stage to one device"
            )
    # The stages before the first one with tensors run on its device.
    current = next(filter(None, own), {torch.device("cpu")})
    result: list[torch.device] = []
    for devices in own:
        current = devices or current
        result += current
    return result
