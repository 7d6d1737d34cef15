"""The stages of a pipe: their layers, devices and tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from pipekernels.device.streams import has_streams
from pipekernels.pipeline.batchnorm import DeferredBatchNorm
from pipekernels.pipeline.context import generators_of
from pipekernels.pipeline.engine.task import Task
from pipekernels.pipeline.skip import SkipRoutes, verify_skippables
from pipekernels.pipeline.timeline import Timeline


class Stages:
    """The stages of a pipe, and what is known of their layers."""

    def __init__(self, modules: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
        self.modules = list(modules)  # The layers of each stage.
        self.devices = list(devices)  # One per stage.
        # Work on devices with streams is issued; on the host, calls return when it is done.
        self.with_streams = [device for device in dict.fromkeys(devices) if has_streams(device)]
        self.on_host = frozenset(i for i, device in enumerate(devices) if not has_streams(device))
        self.generators = generators_of(devices)
        self.timeline: Timeline | None = None  # Records the actions of mini-batches, if any.
        self.inspect_layers()

    def inspect_layers(self) -> None:
        """Must be called whenever layers have changed.

        Raises:
            ValueError: FSDP shards a layer.
            TypeError: skips do not match.
        """
        layers = [layer for stage in self.modules for layer in stage.modules()]
        _refuse_fsdp(layers)
        verify_skippables(nn.Sequential(*self.modules))
        self.skips = SkipRoutes(self.modules)
        self.tasks = [
            Task([stage], index, device, self.skips.received[index], self.skips.sent[index])
            for index, (stage, device) in enumerate(zip(self.modules, self.devices, strict=True))
        ]
        # All stages as one task, which has no copies between them and no skips to pass on.
        is_one = len(set(self.devices)) == 1
        self.fused = Task(self.modules, 0, self.devices[0]) if is_one else None
        self.share_layers = len(layers) != len(set(layers))
        self.has_deferred_batch_norm = any(isinstance(x, DeferredBatchNorm) for x in layers)


def _refuse_fsdp(layers: Sequence[nn.Module]) -> None:
    """Raise a ValueError if FSDP shards a layer."""
    # It would replace the parameter copies by gathered parameters, and reduces gradients only after
    # the backward of the whole autograd graph. A program that has not imported it does not use it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    classes = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = next((type(layer).__name__ for layer in layers if isinstance(layer, classes)), None)
    if sharded is not None:
        raise ValueError(
            f"FSDP shards {sharded}, a layer of the pipe; shard the pipe as a whole, "
            "fully_shard(pipe)"
        )
