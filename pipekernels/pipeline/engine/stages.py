"""The stages of a pipe: their layers, devices and tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipekernels.device.streams import has_streams
from pipekernels.pipeline.stage.batchnorm import has_deferred_batch_norm
from pipekernels.pipeline.stage.entry import PAST_THE_OUTPUT
from pipekernels.pipeline.stage.parameters import StageParameters, drop_accumulated
from pipekernels.pipeline.stage.partition import has_collectives
from pipekernels.pipeline.stage.skip import SkipRoutes
from pipekernels.pipeline.stage.task import Task


@dataclass(frozen=True)
class LayerTraits:
    """Properties of the layers, known without running them, that restrict how they may run."""

    training: tuple[bool, ...]  # Training flag of each layer.
    has_deferred_batch_norm: bool
    recurrent: tuple[nn.RNNBase, ...]  # They draw their dropout masks in C++, inside one call.
    one_thread: str | None  # Why stages must run one after another; None if they need not.

    def draw_hidden_dropout(self) -> bool:
        """Whether layers draw random numbers that lanes cannot seed separately."""
        return any(layer.dropout > 0 and layer.training for layer in self.recurrent)


@dataclass
class ObservedLayers:
    """What mini-batches have observed about the layers, from any thread.

    Attributes:
        changing_buffers: ids of buffers that layers change in their forwards.
        draws: whether layers draw random numbers that lanes can seed separately.
        hidden_randomness: whether they draw some that lanes cannot seed separately.
        sets: whether layers set the state of the process-wide generator, as layers do that seed or
            recompute themselves. That changes the random numbers of other threads.
    """

    changing_buffers: set[int] = field(default_factory=set)
    draws: bool = False
    hidden_randomness: bool = False
    sets: bool = False

    def note_hidden_randomness(self) -> None:
        self.hidden_randomness = True

    def note_set(self, setter: Callable[..., Any], *args: Any) -> Any:
        self.sets = True
        return setter(*args)

    def refuse_hidden_randomness(self) -> None:
        """Note random numbers drawn by a backward on a lane, and raise a RuntimeError. From the
        next mini-batch on the pipe runs on one thread."""
        self.hidden_randomness = True
        raise RuntimeError(
            "a layer of the pipe has begun to draw random numbers in its backward, as layers do "
            "that checkpoint themselves; run this mini-batch again, and the pipe will keep to one "
            "thread"
        )

    def needs_one_thread(self) -> bool:
        """Whether random numbers would depend on timing if stages ran on several threads."""
        return self.hidden_randomness or (self.draws and self.sets)


class Stages:
    """The stages of a pipe, and what is known of their layers.

    Attributes:
        modules, devices: the layers and the device of each stage.
        traits: of the layers.
        observed: what mini-batches add to, and read.
        skips: the routes of skips between stages.
        tasks: one per stage.
        fused: all stages as one task, or None if they must not be fused.
        with_streams: the devices whose work is issued to streams.
        done_when_issued: stages on devices without streams, whose calls return when done.
    """

    def __init__(self, modules: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
        self.modules = list(modules)
        self.devices = list(devices)
        self.skips = SkipRoutes(modules)
        self.tasks = [
            Task([stage], index, device, self.skips.received[index], self.skips.sent[index])
            for index, (stage, device) in enumerate(zip(modules, devices, strict=True))
        ]
        self.fused = Task(modules, 0, devices[0]) if len(set(devices)) == 1 else None
        self.with_streams = [device for device in dict.fromkeys(devices) if has_streams(device)]
        self.done_when_issued = frozenset(
            index for index, device in enumerate(devices) if not has_streams(device)
        )
        self.observed = ObservedLayers()
        self.traits = self.inspect_layers()

    def inspect_layers(self) -> LayerTraits:
        """The ``traits``, which must be set whenever layers have changed.

        Raises:
            ValueError: FSDP shards a layer.
            RuntimeError: layers with skips were added or removed.
        """
        layers = [layer for stage in self.modules for layer in stage.modules()]
        _refuse_fsdp(layers)
        for task in (*self.tasks, *filter(None, [self.fused])):
            task.inspect_layers()
        return LayerTraits(
            training=tuple(layer.training for layer in layers),
            has_deferred_batch_norm=any(map(has_deferred_batch_norm, self.modules)),
            recurrent=tuple(layer for layer in layers if isinstance(layer, nn.RNNBase)),
            one_thread=self._why_one_thread(layers),
        )

    def deny_foreign_backwards(self, parameters: Sequence[StageParameters]) -> None:
        """Raise a RuntimeError if another backward than one of a stage has reached ``parameters``,
        unless it has raised that error itself; drop what it has accumulated."""
        tasks = [*self.tasks, *filter(None, [self.fused])]
        said = any(task.saw_foreign_backward for task in tasks)
        for task in tasks if said else ():
            task.saw_foreign_backward = False
        if drop_accumulated(parameters) and not said:
            raise RuntimeError(PAST_THE_OUTPUT)

    def _why_one_thread(self, layers: Sequence[nn.Module]) -> str | None:
        if any(device.type != "cpu" for device in self.devices):
            return "one thread keeps devices busy, as their work is issued without waiting"
        # They would run it, and accumulate into its parameters, in an order that depends on timing.
        if len(layers) != len(set(layers)):
            return "stages share a layer"
        # All ranks must call collectives in one order; lanes do not order their stages'.
        if any(map(has_collectives, layers)):
            return "layers call collectives, whose order must be the same on all ranks"
        return None


def _refuse_fsdp(layers: Sequence[nn.Module]) -> None:
    """Raise a ValueError if FSDP shards a layer: it would replace the aliases by gathered
    parameters, and reduces gradients only after the backward of the whole autograd graph."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = next((type(layer).__name__ for layer in layers if isinstance(layer, kinds)), None)
    if sharded is not None:
        raise ValueError(
            f"FSDP shards {sharded}, a layer of the pipe; shard the pipe as a whole, "
            "fully_shard(pipe), or have torch's schedules run stages of sharded layers "
            "(pipe.to_torch_stage())"
        )
