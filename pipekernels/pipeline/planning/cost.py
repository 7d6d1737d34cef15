"""Predicts times of actions and peak memory of stages from the costs of their layers.

Runs no layers: ``profile.py`` measures, ``planner.py`` searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, compress
from math import ceil, inf

from pipekernels.pipeline.schedule.program import Action, ActionKind, Program
from pipekernels.pipeline.stage.checkpoint import checkpointed


@dataclass(frozen=True)
class Affine:
    """``fixed + slope * x``; ``fixed`` makes small micro-batches inefficient."""

    fixed: float
    slope: float = 0.0

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed + other.fixed, self.slope + other.slope)

    def __sub__(self, other: Affine) -> Affine:
        return Affine(self.fixed - other.fixed, self.slope - other.slope)

    @staticmethod
    def fit(points: Iterable[tuple[float, float]]) -> Affine:
        """Least-squares fit of relative errors to ``points`` (x, y), with non-negative
        coefficients. If all points have the same x, y is taken as proportional to it, or as
        constant if it is 0."""
        points = list(points)
        top = max(y for _, y in points) or 1.0
        weighted = [(x, y, 1.0 / max(y / top, 1e-3) ** 2) for x, y in points]
        total = sum(w for _, _, w in weighted)
        mean_x = sum(w * x for x, _, w in weighted) / total
        mean_y = sum(w * y for _, y, w in weighted) / total
        variance = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
        proportional = Affine(0.0, mean_y / mean_x) if mean_x > 0 else Affine(mean_y)
        if variance == 0:
            return proportional
        slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / variance
        fixed = mean_y - slope * mean_x
        if slope < 0:
            return Affine(mean_y)
        if fixed < 0:
            return proportional
        return Affine(fixed, slope)


@dataclass(frozen=True)
class LayerCost:
    """Seconds and bytes (see ``profile.Bytes``) of one layer, as functions of a micro-batch's
    rows."""

    forward: Affine
    backward: Affine
    input_backward: Affine
    kept: Affine
    entry: Affine
    inputs: Affine
    outputs: Affine
    working: Affine
    trainable: int
    constant: int


class Setting:
    """How a pipeline is run, apart from its balance: ``rows`` are the micro-batches' sizes."""

    def __init__(
        self, schedule: str, program: Program, rows: Sequence[int], checkpoint: str
    ) -> None:
        self.schedule = schedule
        self.program = program
        self.rows = tuple(rows)
        self.checkpoint = checkpoint
        self.dropped = tuple(checkpointed(checkpoint, m, len(rows)) for m in range(len(rows)))
        self.held = [self._held(stage) for stage in range(program.stages)]
        """For each stage, the Pareto-maximal (graphs, inputs kept for recomputation) held at
        once."""

    def _held(self, stage: int) -> list[tuple[int, int]]:
        graphs = inputs = 0
        moments = {(0, 0)}
        for kind, s, m in self.program.lanes[self.program.lane_of[stage]]:
            if s != stage:
                continue
            if kind == "F":
                graphs, inputs = graphs + (not self.dropped[m]), inputs + self.dropped[m]
            elif kind in ("B", "I") and self.dropped[m]:
                graphs, inputs = graphs + 1, inputs - 1  # Recomputed.
            moments.add((graphs, inputs))
            if kind in ("B", "W"):
                graphs -= 1
        return [
            moment
            for moment in moments
            if not any(
                other != moment and other[0] >= moment[0] and other[1] >= moment[1]
                for other in moments
            )
        ]


class CostModel:
    """Costs of any cut of a module under any setting.

    Args:
        layers: the layers of the module.
        hand_off: seconds, by bytes, for passing a micro-batch from one lane to another.
        param_scale: memory for a trainable parameter, its gradient and optimizer state, in sizes of
            the parameter.
    """

    def __init__(self, layers: Sequence[LayerCost], hand_off: Affine, param_scale: float) -> None:
        self.layers = list(layers)
        self._hand_off = hand_off
        self._forward = _sums(layer.forward for layer in layers)
        self._backward = _sums(layer.backward for layer in layers)
        self._input_backward = _sums(layer.input_backward for layer in layers)
        self._kept = _sums(layer.kept for layer in layers)
        self._static = [
            0.0, *accumulate(layer.trainable * param_scale + layer.constant for layer in layers)
        ]  # fmt: skip

    def seconds(self, setting: Setting, edges: Sequence[int]) -> Callable[[Action], float]:
        """Durations of the actions if stage ``s`` has the layers ``edges[s]`` to
        ``edges[s + 1] - 1``, including the hand-off if another lane sends the input."""

        lane_of = setting.program.lane_of

        @cache
        def duration(kind: ActionKind, stage: int, rows: int, dropped: bool) -> float:
            begin, end = edges[stage], edges[stage + 1]
            forward = self._forward[end] - self._forward[begin]
            backward = self._backward[end] - self._backward[begin]
            of_inputs = self._input_backward[end] - self._input_backward[begin]
            if kind == "F":
                return forward(rows) + received(stage - 1, stage, stage, rows)
            if kind == "W":
                return (backward - of_inputs)(rows)
            time = backward(rows) if kind == "B" else of_inputs(rows)
            if dropped:
                time += forward(rows)
            return time + received(stage + 1, stage, stage + 1, rows)

        def received(giver: int, taker: int, edge: int, rows: int) -> float:
            if lane_of.get(giver, lane_of[taker]) == lane_of[taker]:
                return 0.0
            return self._hand_off(self.layers[edges[edge]].inputs(rows))

        return lambda a: duration(
            a.kind, a.stage, setting.rows[a.micro_batch], setting.dropped[a.micro_batch]
        )

    def least_step(self, setting: Setting) -> float:
        """A lower bound of the step time for any balance: all work, divided by the lanes."""
        work, _ = self._work_and_latency(setting)
        return work[-1] / len(setting.program.lanes)

    def least_seconds(self, setting: Setting, limit: float) -> Callable[[int, int, int], float]:
        """A lower bound of the step time, as a function of one stage and its layers: ``(stage,
        begin, end)``. It is the time of the stage's work, plus that of one micro-batch's forward
        through earlier stages and backward through them; ``inf`` above ``limit`` bytes."""
        work, latency = self._work_and_latency(setting)
        stage_bytes = self.stage_bytes(setting)

        def compute(stage: int, begin: int, end: int) -> float:
            if limit < inf and stage_bytes(stage, begin, end) > limit:
                return inf
            return latency[begin] + work[end] - work[begin]

        return compute

    def _work_and_latency(self, setting: Setting) -> tuple[list[float], list[float]]:
        """Sums over the first 0, 1, ... layers: seconds of work on the mini-batch, and seconds of
        one micro-batch's forward and backward."""
        count, rows = len(setting.rows), sum(setting.rows)
        forwards = count + sum(setting.dropped)
        forward_rows = rows + sum(compress(setting.rows, setting.dropped))
        smallest = min(setting.rows)
        work, latency = [], []
        for forward, backward in zip(self._forward, self._backward, strict=True):
            work.append(
                (forwards * forward.fixed + forward_rows * forward.slope)
                + (count * backward.fixed + rows * backward.slope)
            )
            # With split backwards a stage's last action may be a W, for which no stage waits.
            back = 0.0 if setting.program.splits else backward(smallest)
            latency.append(forward(smallest) + back)
        return work, latency

    def stage_bytes(self, setting: Setting) -> Callable[[int, int, int], int]:
        """Peak memory of one stage, as a function of ``(stage, begin, end)``."""
        rows, batch = max(setting.rows), sum(setting.rows)
        kept = [sums(rows) for sums in self._kept]
        working = [layer.working(rows) for layer in self.layers]

        @cache
        def compute(stage: int, begin: int, end: int) -> int:
            total = self._static[end] - self._static[begin]
            if begin == 0:
                inputs = entry = 0.0
                total += self.layers[0].inputs(batch)
            else:
                inputs = self.layers[begin].inputs(rows)
                entry = self.layers[begin].entry(rows)
            if end == len(self.layers):
                total += 2 * self.layers[-1].outputs(batch)
            graph = entry + kept[end] - kept[begin]
            held = max(graphs * graph + dropped * inputs for graphs, dropped in setting.held[stage])
            return ceil(total + held + max(working[begin:end]))

        return compute


def _sums(terms: Iterable[Affine]) -> list[Affine]:
    return list(accumulate(terms, initial=Affine(0.0)))
