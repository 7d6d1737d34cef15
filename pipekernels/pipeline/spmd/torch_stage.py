"""A pipe's partition as a stage of ``torch.distributed.pipelining``, one process per stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pipekernels.device.streams import usable
from pipekernels.pipeline.stage.batchnorm import has_deferred_batch_norm
from pipekernels.pipeline.stage.partition import deny_sharing, layers
from pipekernels.pipeline.stage.skip import SkipRoutes

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def torch_stage(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    stage_index: int | None,
    device: torch.device | int | str | None,
    group: dist.ProcessGroup | None,
) -> PipelineStage:
    """Implements ``Pipe.to_torch_stage``."""
    if stage_index is None:
        ranks = max(0, dist.get_world_size(group))
        if ranks != len(partitions):
            raise ValueError(
                f"the pipe has {len(partitions)} stages and this rank's group has {ranks} ranks; "
                "choose a balance or a group for a rank per stage, or pass stage_index where a "
                "rank runs several"
            )
        stage_index = dist.get_rank(group)
    if not 0 <= stage_index < len(partitions):
        raise ValueError(f"stage_index is {stage_index}; it must be in 0..{len(partitions) - 1}")
    _check_separable(partitions)
    from torch.distributed.pipelining import PipelineStage  # Slow to import.

    home = devices[stage_index] if device is None else usable(device)
    stage = _Layers(partitions[stage_index], spread=stage_index == 0).to(home)
    return PipelineStage(stage, stage_index, len(partitions), home, group=group)


class _Layers(nn.Sequential):
    """A partition as torch's stages call it, with several tensors as separate arguments. Its first
    layer takes them so if ``spread``, as in a pipe, and else a tuple."""

    def __init__(self, partition: nn.Sequential, spread: bool) -> None:
        super().__init__(OrderedDict(partition._modules))
        self.training = partition.training
        self._spread = spread

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(inputs) > 1 and not self._spread:
            inputs = (inputs,)
        first, *rest = layers(self)
        value = first(*inputs, **kwargs)
        for layer in rest:
            value = layer(value)
        return value


def _check_separable(partitions: Sequence[nn.Sequential]) -> None:
    """Raise a ValueError if stages in separate processes would compute something else."""
    owners: dict[int, int] = {}
    received = SkipRoutes(partitions).received
    for index, partition in enumerate(partitions):
        named = [(f"parameter {name!r}", value) for name, value in partition.named_parameters()]
        remedy = "choose a balance that keeps the layers that share it in one process"
        deny_sharing(named, index, owners, "stages", remedy)
        if received[index]:
            raise ValueError(
                f"stage {index} pops {', '.join(repr(name) for _, name in received[index])}, which "
                "an earlier stage stashes; torch's stages carry no skips, so choose a balance "
                "that keeps both ends of each in one stage"
            )
        if has_deferred_batch_norm(partition):
            raise ValueError(
                f"stage {index} has deferred batch norm, which only a Pipe's own forward commits; "
                "build the Pipe without deferred_batch_norm"
            )
