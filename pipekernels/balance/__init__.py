"""A ``balance`` for ``Pipe`` that minimises the cost of the most expensive stage, as measured.

The interface is fairscale's and torchgpipe's. Profiling runs copies of the layers, one at a time.
It does not change the module (parameters and their ``.grad``, buffers, training mode, devices) nor
the state of torch's random number generators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipekernels._arguments import integer
from pipekernels.balance import blockpartition
from pipekernels.balance.blockpartition import lengths
from pipekernels.balance.profile import first_micro_batch, measure_bytes, measure_seconds
from pipekernels.device.streams import usable
from pipekernels.pipeline.partition import check_sequential, layers

Device = torch.device | int | str

__all__ = ["balance_by_size", "balance_by_time", "blockpartition"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """The numbers of layers that minimise the slowest stage's time for a forward and a backward.

    Args:
        partitions: number of stages.
        module: the layers.
        sample: a typical microbatch: a tensor ``[batch, ...]`` or a tuple, list or dict of them.
        timeout: the seconds for which layers take turns, each at least three times.
        device: where to measure. Default: the current CUDA device; the CPU where there is none.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or there is no tensor in ``sample``.
        ValueError: ``partitions`` or ``timeout`` is out of range, the tensors differ in their batch
            size, or a layer has collectives.
    """
    where = _checked(module, partitions, device)
    micro_batch = first_micro_batch(sample, 1)
    return lengths(measure_seconds(module, micro_batch, where, timeout=timeout), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """The numbers of layers that minimise the largest stage's memory.

    A stage's memory is estimated as the activations that one microbatch keeps for its backward, as
    with checkpointing, plus ``param_scale`` times its trainable parameters, plus frozen parameters
    and buffers.

    Args:
        partitions: number of stages.
        module: the layers.
        input: a mini-batch: a tensor ``[batch, ...]`` or a tuple, list or dict of them.
        chunks: the number of microbatches into which it will be cut.
        param_scale: memory for a parameter, its gradient and optimizer state, in sizes of the
            parameter: :doc:`/guides/pipe` has the sizes for torch's optimizers.
        device: where to measure. Default: the current CUDA device; the CPU where there is none.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or there is no tensor in ``input``.
        ValueError: ``partitions``, ``chunks`` or ``param_scale`` is out of range, or ``input``
            cannot be cut.
    """
    where = _checked(module, partitions, device)
    chunks = integer("chunks", chunks)
    if not param_scale >= 0:
        raise ValueError(f"param_scale is {param_scale}; it must not be negative")
    costs: list[float] = list(measure_bytes(module, first_micro_batch(input, chunks), where))
    for i, layer in enumerate(layers(module)):
        for tensor in (*layer.parameters(), *layer.buffers()):
            costs[i] += tensor.nbytes * (param_scale if tensor.requires_grad else 1)
    return lengths(costs, partitions)


def _checked(module: nn.Sequential, partitions: int, device: Device | None) -> torch.device:
    """Where to measure, once ``module`` can be cut."""
    check_sequential(module)
    lengths([0.0] * len(layers(module)), partitions)  # Raises now, not after the measurement.
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return usable(default if device is None else device)
