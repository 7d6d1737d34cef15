"""Chooses balance, chunks, schedule and checkpointing for a module by the costs of its layers."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, islice, pairwise
from math import inf
from typing import Any

import torch
from torch import nn

from pipekernels._arguments import integer
from pipekernels.device.restoring import restore_despite_interrupt
from pipekernels.device.streams import usable
from pipekernels.local_ops.micro_batch import micro_batch_sizes
from pipekernels.pipeline.engine.lanes import intra_op_threads
from pipekernels.pipeline.pipe import Device, Pipe
from pipekernels.pipeline.planning import profile
from pipekernels.pipeline.planning.cost import Affine, CostModel, Forecast, LayerCost, Setting
from pipekernels.pipeline.planning.cuts import cuts
from pipekernels.pipeline.planning.memory import measure_bytes
from pipekernels.pipeline.schedule.program import SCHEDULES, Schedule, simulate
from pipekernels.pipeline.stage.checkpoint import MODES
from pipekernels.pipeline.stage.partition import check_sequential, layers

STAGES_PER_LANE = 2
"""For the interleaved schedule."""
CHUNKS_PER_LANE = 4
"""Default of ``max_chunks``, per lane: the bubble is at most a fifth then (Huang et al., 2019)."""
CUTS = 16
"""The most cuts to try for one setting, by time and by memory."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; ``seconds`` is its work on the whole mini-batch, without hand-offs."""

    device: torch.device
    layers: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Plan:
    """How to run a module as a pipeline, with the predicted time and memory.

    ``print(plan)`` shows it; :meth:`build` makes the pipe.
    """

    schedule: str
    """For ``Pipe.train_step``; calling the pipe and then ``backward()`` is always GPipe's."""
    lanes: int
    """How many lanes; as many as stages unless the schedule is interleaved."""
    chunks: int
    checkpoint: str
    batch: int
    """Rows of the mini-batch that the plan is for."""
    stages: tuple[StagePlan, ...]
    step_seconds: float
    """Forward and backward of one mini-batch."""
    bubble: float
    """Idle share of the lanes' time, 0 to 1."""
    memory_limit: int | None

    @property
    def balance(self) -> list[int]:
        """Number of layers of each stage."""
        return [stage.layers for stage in self.stages]

    @property
    def peak_bytes(self) -> dict[torch.device, int]:
        """Peak memory of each device."""
        return _peaks(self.stages)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``Pipe``."""
        return {
            "balance": self.balance,
            "devices": [stage.device for stage in self.stages],
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
        }

    @property
    def train_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``Pipe.train_step``."""
        lanes = self.lanes if self.schedule == "interleaved" else None
        return {"schedule": self.schedule, "lanes": lanes}

    def build(self, module: nn.Sequential) -> Pipe:
        """``Pipe(module, **plan.arguments)``."""
        return Pipe(module, **self.arguments)

    def __str__(self) -> str:
        table = "  {:>5}  {:<8}  {:>11}  {:>10}  {:>11}"
        lines = [
            f"{self.schedule} on {self.lanes} lanes, batch {self.batch} in {self.chunks} chunks, "
            + f"checkpoint {self.checkpoint!r}",
            table.format("stage", "device", "layers", "work", "peak memory"),
        ]
        for i, (begin, end) in enumerate(pairwise([0, *accumulate(self.balance)])):
            device, work = str(self.stages[i].device), _duration(self.stages[i].seconds)
            peak = _size(self.stages[i].peak_bytes)
            lines.append(table.format(i, device, f"{begin} to {end - 1}", work, peak))
        peaks = ", ".join(f"{_size(peak)} on {device}" for device, peak in self.peak_bytes.items())
        allowed = "" if self.memory_limit is None else f" of {_size(self.memory_limit)} allowed"
        return "\n".join(lines) + (
            f"\n  predicted step: {_duration(self.step_seconds)}, {self.bubble:.0%} of it bubble"
            f"\n  predicted peak memory: {peaks}{allowed}"
        )


@restore_despite_interrupt
def plan_pipeline(
    module: nn.Sequential,
    sample: Any,
    *,
    devices: Iterable[Device] | None = None,
    memory_limit: int | None = None,
    max_chunks: int | None = None,
    schedules: Iterable[str] = tuple(SCHEDULES),
    param_scale: float = 2.0,
    timeout: float = 1.0,
) -> Plan:
    """Choose the fastest pipeline for ``module`` that fits into memory, and predict its step time
    and peak memory, without building it::

        plan = plan_pipeline(module, sample, memory_limit=2 * 2**30)
        print(plan)
        pipe = plan.build(module)
        loss = pipe.train_step(input, target, loss_fn, **plan.train_arguments)

    The time and memory of every layer are measured at three micro-batch sizes, and those of other
    sizes are interpolated linearly. Then, for every number of chunks, schedule and checkpoint mode,
    the most promising cuts are simulated. The module and torch's random numbers are not changed.

    The predicted memory is an upper estimate: parameters, gradients and optimizer state
    (``param_scale``), buffers, activations of all micro-batches in flight, the largest working
    memory of a layer, the mini-batch, and its output with a gradient. The loss and the optimizer's
    step are left out; the guide lists what else is.

    Args:
        module: the layers; without collectives, so plan first, then ``tensor_parallelize``.
        sample: a mini-batch of the size to be trained with: a tensor ``[batch, ...]`` or a tuple,
            list or dict of them, the first layer's argument.
        devices: one per lane, all as fast as the first, where the layers are measured. Default: all
            CUDA devices; where there is none the CPU for as many lanes as it has intra-op threads.
        memory_limit: bytes that each device may hold; all lanes on the CPU share them. Default: no
            limit.
        max_chunks: most micro-batches to consider. Default: four per device.
        schedules: names of the schedules to choose from. Default: all that ``Pipe.train_step``
            knows. For a pipe that is called and followed by ``backward()``: ``["gpipe"]``.
        param_scale: how many times trainable parameters are held; 2 counts them and their
            gradients, 4 also Adam's state.
        timeout: seconds to spend on timing layers.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, there is no tensor in ``sample``, or
            ``devices`` or ``schedules`` is a single name.
        ValueError: an argument is out of its range, there are fewer layers than devices, weights
            are on the meta device, a layer has collectives, or nothing fits into ``memory_limit``;
            then the error names the smallest peak found.
    """
    check_sequential(module)
    for name, names in (("devices", devices), ("schedules", schedules)):
        if isinstance(names, str):
            raise TypeError(f"{name} is {names!r}; give a list, such as [{names!r}]")
    batch, layer_count = profile.batch_size(sample), len(layers(module))
    chosen = _devices(devices, layer_count)
    if not 1 <= len(chosen) <= layer_count:
        raise ValueError(
            f"there are {len(chosen)} devices for {layer_count} layers; give at least one "
            "device, and at most one per layer"
        )
    limit = inf if memory_limit is None else memory_limit
    if not (isinstance(limit, (int, float)) and limit > 0):
        raise ValueError(f"memory_limit is {memory_limit!r}; it must be a positive number of bytes")
    most_chunks = CHUNKS_PER_LANE * len(chosen)
    if max_chunks is not None:
        most_chunks = integer("max_chunks", max_chunks)
    if batch < 1:
        raise ValueError("the sample has no rows; give a mini-batch of the size to be trained with")
    if not 0 <= param_scale < inf:
        raise ValueError(f"param_scale is {param_scale}; it must be finite and not negative")
    possible = possible_settings(len(chosen), layer_count, batch, most_chunks, schedules)
    least = micro_batch_sizes(batch, most_chunks)[0]
    sizes = sorted({least, round((least * batch) ** 0.5), batch})
    threads = torch.get_num_threads()
    if all(device.type == "cpu" for device in chosen):
        threads = max(1, threads // len(chosen))
    with intra_op_threads(threads):
        costs = measure_costs(module, sample, chosen[0], sizes, timeout=timeout)
    hand_off = Affine.fit(profile.measure_hand_off(chosen))
    return choose(CostModel(costs, hand_off, param_scale), chosen, possible, memory_limit)


def possible_settings(
    lanes: int, layer_count: int, batch: int, max_chunks: int, schedules: Iterable[str]
) -> list[Setting]:
    """All distinct settings for a mini-batch of ``batch`` rows; a ValueError if there is none, or
    no schedule of a name."""
    found: list[Setting] = []
    for name in schedules:
        interleave = lanes if name == "interleaved" else None
        stages = lanes * (STAGES_PER_LANE if interleave else 1)
        schedule = Schedule(name, interleave)
        for chunks in range(1, min(max_chunks, batch) + 1 if stages <= layer_count else 1):
            rows, program = micro_batch_sizes(batch, chunks), schedule.program(stages, chunks)
            for checkpoint in reversed(MODES):
                if chunks > 1 or checkpoint != "except_last":  # Of one, that is "never".
                    found.append(Setting(name, program, rows, checkpoint))
    if not found:
        raise ValueError(
            f"no schedule is left to choose from for {layer_count} layers on {lanes} lanes; take "
            f"some of {', '.join(SCHEDULES)}, of which 'interleaved' needs {STAGES_PER_LANE} "
            "layers per lane"
        )
    return found


def choose(
    model: CostModel,
    devices: Sequence[torch.device],
    settings: Iterable[Setting],
    memory_limit: int | None = None,
) -> Plan:
    """The fastest plan for which each of ``devices``, one per lane, holds at most ``memory_limit``
    bytes; a ValueError if none fits."""
    limit = inf if memory_limit is None else memory_limit
    best: Plan | None = None
    smallest: tuple[int, Setting, list[int]] | None = None
    forecasts = (Forecast(model, setting) for setting in settings)
    for forecast in sorted(forecasts, key=lambda forecast: forecast.least_step):
        if best is not None and forecast.least_step >= best.step_seconds:
            break
        for balance in _candidates(forecast, devices, limit):
            stages = _stages(forecast, devices, balance)
            peak = max(_peaks(stages).values())
            if peak > limit:
                if smallest is None or peak < smallest[0]:
                    smallest = peak, forecast.setting, balance
            elif best is None or forecast.least_seconds(balance) < best.step_seconds:
                plan = _predicted(forecast, stages, memory_limit)
                if best is None or plan.step_seconds < best.step_seconds:
                    best = plan
    if best is None:
        assert smallest is not None
        peak, setting, balance = smallest
        raise ValueError(
            f"no plan fits into {memory_limit} bytes ({_size(limit)}) per device; the smallest "
            f"peak found is {peak} bytes ({_size(peak)}), with {setting.schedule}, "
            f"{len(setting.rows)} chunks, checkpoint {setting.checkpoint!r} and balance {balance}; "
            "raise memory_limit, allow more chunks, or use more devices or a smaller batch"
        )
    return best


def _candidates(
    forecast: Forecast, devices: Sequence[torch.device], limit: float
) -> Iterator[list[int]]:
    """The balances to try: those with the lowest bounds of the step time whose stages each fit into
    ``limit`` bytes, then those that need the least memory. The first of these is optimal if each
    device has one stage, or one device has all."""
    n, stages = len(forecast.model.layers), forecast.setting.program.stages

    def seconds(stage: int, begin: int, end: int) -> float:
        fits = limit == inf or forecast.stage_bytes(stage, begin, end) <= limit
        return forecast.stage_least_seconds(begin, end) if fits else inf

    fastest = cuts(n, stages, seconds)
    yield from (balance for _, balance in islice(fastest, CUTS))
    if limit < inf:
        combine = operator.add if len(set(devices)) == 1 else max
        smallest = cuts(n, stages, forecast.stage_bytes, combine)
        yield from (balance for _, balance in islice(smallest, CUTS))


def _stages(
    forecast: Forecast, devices: Sequence[torch.device], balance: Sequence[int]
) -> tuple[StagePlan, ...]:
    stages = []
    for stage, (begin, end) in enumerate(pairwise([0, *accumulate(balance)])):
        device = devices[forecast.setting.program.lane_of[stage]]
        seconds, peak = forecast.stage_seconds(begin, end), forecast.stage_bytes(stage, begin, end)
        stages.append(StagePlan(device, end - begin, seconds, peak))
    return tuple(stages)


def _peaks(stages: Iterable[StagePlan]) -> dict[torch.device, int]:
    peaks: Counter[torch.device] = Counter()
    for stage in stages:
        peaks[stage.device] += stage.peak_bytes
    return dict(peaks)


def _predicted(forecast: Forecast, stages: tuple[StagePlan, ...], limit: int | None) -> Plan:
    setting = forecast.setting
    edges = [0, *accumulate(stage.layers for stage in stages)]
    simulation = simulate(setting.program, forecast.seconds(edges))
    return Plan(
        schedule=setting.schedule,
        lanes=len(setting.program.lanes),
        chunks=len(setting.rows),
        checkpoint=setting.checkpoint,
        batch=sum(setting.rows),
        stages=stages,
        step_seconds=simulation.makespan,
        bubble=simulation.bubble,
        memory_limit=limit,
    )


def measure_costs(
    module: nn.Sequential, sample: Any, device: torch.device, sizes: Sequence[int], timeout: float
) -> list[LayerCost]:
    """Costs of the layers, fitted to measurements with ``sizes`` rows."""
    samples = [profile.first_rows(sample, rows) for rows in sizes]
    times = profile.measure_seconds(module, samples, device, timeout=timeout, split=True)
    memory = [measure_bytes(module, each, device) for each in samples]

    def fitted(measurements: Iterable[Any]) -> Iterator[Affine]:
        for values in zip(*map(astuple, measurements), strict=True):
            yield Affine.fit(zip(sizes, values, strict=True))

    of_layers = zip(zip(*times, strict=True), zip(*memory, strict=True), strict=True)
    return [LayerCost(*fitted(seconds), *fitted(nbytes)) for seconds, nbytes in of_layers]


def _devices(devices: Iterable[Device] | None, layer_count: int) -> list[torch.device]:
    if devices is not None:
        return list(map(usable, devices))
    count = torch.cuda.device_count()
    if count:
        return [torch.device("cuda", i) for i in range(min(count, layer_count))]
    return [torch.device("cpu")] * min(torch.get_num_threads(), layer_count)


def _duration(seconds: float) -> str:
    return _in_units(seconds, ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def _size(nbytes: float) -> str:
    return _in_units(nbytes, ("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30))


def _in_units(value: float, smallest: tuple[str, float], *larger: tuple[str, float]) -> str:
    fitting = [smallest, *(unit for unit in larger if value >= unit[1])]
    name, scale = fitting[-1]
    return f"{value / scale:.4g} {name}"
