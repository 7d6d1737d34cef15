"""Predicts times of actions and peak memory of stages from the costs of their layers.

Runs no layers: ``profile.py`` and ``memory.py`` measure, ``planner.py`` searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, compress, pairwise
from math import ceil
from typing import Any, NamedTuple

from pipekernels.pipeline.schedule.program import Action, ActionKind, Program
from pipekernels.pipeline.stage.checkpoint import checkpointed


@dataclass(frozen=True)
class Affine:
    """``fixed + slope * x``; ``fixed`` makes small micro-batches inefficient."""

    fixed: float
    slope: float = 0.0

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    def sum(self, xs: Sequence[float]) -> float:
        """The sum of its values at ``xs``."""
        return len(xs) * self.fixed + sum(xs) * self.slope

    @staticmethod
    def fit(points: Iterable[tuple[float, float]]) -> Affine:
        """Least-squares fit of relative errors to ``points`` (x, y), with non-negative
        coefficients. If all x are the same, y is taken as proportional to it, or as constant if it
        is 0."""
        points = list(points)
        top = max(y for _, y in points) or 1.0
        weighted = [(x, y, max(y / top, 1e-3) ** -2) for x, y in points]
        total = sum(w for _, _, w in weighted)
        mean_x = sum(w * x for x, _, w in weighted) / total
        mean_y = sum(w * y for _, y, w in weighted) / total
        variance = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
        if variance > 0:
            slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / variance
            fixed = mean_y - slope * mean_x
            if slope < 0:
                return Affine(mean_y)
            if fixed >= 0:
                return Affine(fixed, slope)
        return Affine(0.0, mean_y / mean_x) if mean_x > 0 else Affine(mean_y)


@dataclass(frozen=True)
class Seconds:
    """Times of one layer on one micro-batch."""

    forward: Any
    backward: Any
    input_backward: Any
    """The part of ``backward`` that computes gradients of inputs; 0 if it was not measured."""


@dataclass(frozen=True)
class Bytes:
    """Memory of one layer on one micro-batch."""

    kept: Any
    """Memory kept for its backward, without what earlier layers keep and without the sample."""
    entry: Any
    """Memory of inputs that is not in ``kept``, which a stage keeps if it begins with this layer.
    (If the layer returns its inputs and a later one keeps them, they count twice.)"""
    inputs: Any
    outputs: Any
    working: Any
    """Temporary memory of its forward and backward, at the peak, without ``kept``."""
    trainable: Any
    """Its trainable parameters."""
    constant: Any
    """Its other parameters, and its buffers."""


@dataclass(frozen=True)
class LayerCost(Bytes, Seconds):
    """Seconds and bytes of one layer as :class:`Affine` functions of a micro-batch's rows."""


class CostModel(NamedTuple):
    """What a pipe costs, apart from its setting and balance."""

    layers: Sequence[LayerCost]
    hand_off: Affine
    """Seconds, by bytes, for passing a micro-batch from one lane to another."""
    param_scale: float
    """Memory for a trainable parameter, its gradient and optimizer state, in its sizes."""


@dataclass
class Setting:
    """How a pipeline is run, apart from its balance: ``rows`` are the micro-batches' sizes."""

    schedule: str
    program: Program
    rows: Sequence[int]
    checkpoint: str

    @cached_property
    def recomputed(self) -> tuple[bool, ...]:
        """Which micro-batches are recomputed."""
        count = len(self.rows)
        return tuple(checkpointed(self.checkpoint, m, count) for m in range(count))

    @cached_property
    def held(self) -> list[list[tuple[int, int]]]:
        """For each stage, the Pareto-maximal (graphs, inputs to be recomputed) held at once."""
        held = [(0, 0)] * self.program.stages
        moments = [{(0, 0)} for _ in held]
        for kind, stage, m in chain.from_iterable(self.program.lanes):
            graphs, inputs = held[stage]
            if kind == "F":
                graphs, inputs = graphs + (not self.recomputed[m]), inputs + self.recomputed[m]
            elif kind in ("B", "I") and self.recomputed[m]:
                graphs, inputs = graphs + 1, inputs - 1  # Recomputed.
            moments[stage].add((graphs, inputs))
            held[stage] = graphs - (kind in ("B", "W")), inputs
        maximal: list[list[tuple[int, int]]] = [[] for _ in held]
        for most, of_stage in zip(maximal, moments, strict=True):
            for graphs, inputs in sorted(of_stage, reverse=True):
                if not most or inputs > most[-1][1]:
                    most.append((graphs, inputs))
        return maximal


class Forecast:
    """Predicts times and memory of any cut under one setting.

    Attributes:
        least_step: a lower bound of the step time: all work, divided by the lanes.
        stage_bytes: peak memory of one stage, as a function of ``(stage, begin, end)`` if it has
            the layers ``begin`` to ``end - 1``.
    """

    def __init__(self, model: CostModel, setting: Setting) -> None:
        self.model = model
        self.setting = setting
        layers, rows = model.layers, setting.rows
        least, most = min(rows), max(rows)
        forwards = [*rows, *compress(rows, setting.recomputed)]
        # With split backwards a stage's last action may be a W, for which no stage waits.
        backward = [] if setting.program.splits else [least]
        # Sums over the first 0, 1, ... layers.
        self._work = _sums(c.forward.sum(forwards) + c.backward.sum(rows) for c in layers)
        self._latency = _sums(c.forward(least) + c.backward.sum(backward) for c in layers)
        self._kept = _sums(c.kept(most) for c in layers)
        scale = model.param_scale
        self._weights = _sums(c.trainable(most) * scale + c.constant(most) for c in layers)
        self._working: list[float] = [c.working(most) for c in layers]
        self.least_step = self._work[-1] / len(setting.program.lanes)
        self.stage_bytes = cache(self._stage_bytes)

    def least_seconds(self, balance: Sequence[int]) -> float:
        """A lower bound of the step time, the largest of the stages'."""
        edges = pairwise([0, *accumulate(balance)])
        return max(self.stage_least_seconds(begin, end) for begin, end in edges)

    def stage_least_seconds(self, begin: int, end: int) -> float:
        """A lower bound of the step time if a stage has these layers: the time of its work, and
        that of one micro-batch's forward through earlier stages and backward through them."""
        return self._latency[begin] + self.stage_seconds(begin, end)

    def stage_seconds(self, begin: int, end: int) -> float:
        """The time of the work of a stage with these layers on the whole mini-batch."""
        return self._work[end] - self._work[begin]

    def _stage_bytes(self, stage: int, begin: int, end: int) -> int:
        layers, rows, batch = self.model.layers, max(self.setting.rows), sum(self.setting.rows)
        total: float = self._weights[end] - self._weights[begin] + max(self._working[begin:end])
        graph, inputs = self._kept[end] - self._kept[begin], 0.0
        if begin == 0:
            total += layers[0].inputs(batch)
        else:
            graph, inputs = graph + layers[begin].entry(rows), layers[begin].inputs(rows)
        if end == len(layers):
            total += 2 * layers[-1].outputs(batch)
        held = (graphs * graph + count * inputs for graphs, count in self.setting.held[stage])
        return ceil(total + max(held))

    def seconds(self, edges: Sequence[int]) -> Callable[[Action], float]:
        """Durations of the actions if stage ``s`` has the layers ``edges[s]`` to
        ``edges[s + 1] - 1``, including the hand-off if another lane sends the input."""
        model, program = self.model, self.setting.program

        @cache
        def duration(kind: ActionKind, stage: int, rows: int, recomputed: bool) -> float:
            own = model.layers[edges[stage] : edges[stage + 1]]
            forward: float = sum(layer.forward(rows) for layer in own)
            backward: float = sum(layer.backward(rows) for layer in own)
            of_inputs: float = sum(layer.input_backward(rows) for layer in own)
            time = {"F": forward, "B": backward, "I": of_inputs, "W": backward - of_inputs}[kind]
            if recomputed and kind in ("B", "I"):
                time += forward
            sender = program.before(Action(kind, stage, 0))
            if sender is not None and program.lane_of[sender] != program.lane_of[stage]:
                time += model.hand_off(model.layers[edges[max(sender, stage)]].inputs(rows))
            return time

        rows, recomputed = self.setting.rows, self.setting.recomputed
        return lambda a: duration(a.kind, a.stage, rows[a.micro_batch], recomputed[a.micro_batch])


def _sums(terms: Iterable[float]) -> list[float]:
    return list(accumulate(terms, initial=0.0))
