"""Fair timing: the candidates of a case take turns; figures are medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

Turn = Callable[[], "float | Sequence[float] | None"]
Plan = Mapping[str, Sequence[str]]  # Candidates by case.


class Options(NamedTuple):
    """How to measure.

    Attributes:
        quick: few rounds and small sizes, to see that it runs.
        device: what a benchmark of GPUs measures; a CPU in the quick form alone.
        seconds: for what takes as long as it may.
    """

    quick: bool = False
    device: torch.device = torch.device("cpu")
    seconds: float = 120.0


class Turns(NamedTuple):
    """What is measured in a case.

    Attributes:
        runners: by candidate, for :func:`alternate`; those with a ``close`` are closed afterwards.
        warmup, rounds: how often each takes a turn.
        more: gives further fields of rows, by candidate; called with their medians.
        close: called in the end.
        fields: of all rows.
    """

    runners: Mapping[str, Turn]
    warmup: int
    rounds: int
    more: Callable[[dict[str, float]], Mapping[str, Mapping[str, Any]]] = lambda medians: {}
    close: Callable[[], object] = lambda: None
    fields: Mapping[str, Any] = {}


class Measured(NamedTuple):
    """One case of a benchmark.

    Attributes:
        case: its name.
        samples: of each candidate, in the order of its turns; seconds, unless the module has a
            ``UNIT``.
        rows: what the result file says about the case: a row per candidate.
    """

    case: str
    samples: Mapping[str, Sequence[float]]
    rows: list[dict[str, Any]]


def alternate(
    candidates: Mapping[str, Turn], *, warmup: int, rounds: int, start: int = 0
) -> dict[str, list[float]]:
    """Time all candidates in turn, so that drifts of the machine's speed affect all of them.

    The orders are Latin squares balanced for neighbours (E. J. Williams, 1949), one and its mirror
    image, as an odd number of candidates needs both. Over twice as many rounds as there are
    candidates, each follows every other one equally often: a predecessor affects the caches.

    Args:
        candidates: by name; each call is one sample. A candidate that times itself (without its
            set-up, or in another process) returns its seconds, or those of several samples;
            otherwise the whole call is timed.
        warmup: rounds whose samples are dropped.
        rounds: rounds whose samples are returned.
        start: number of rounds in earlier calls, whose orders this call continues.

    Returns:
        Seconds of all samples, by name.
    """
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    steps = [(i + 1) // 2 * (-1) ** (i + 1) for i in range(len(names))]  # 0, 1, -1, 2, -2, ...
    for round_ in range(start, start + warmup + rounds):
        side = (-1) ** (round_ // (len(names) or 1))
        for name in (names[(round_ + side * step) % len(names)] for step in steps):
            begin = time.perf_counter()
            own = candidates[name]()
            seconds = time.perf_counter() - begin if own is None else own
            if round_ >= start + warmup:
                samples[name] += [seconds] if isinstance(seconds, float) else seconds
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and minimum of ``samples``, in their unit."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {
        "median": statistics.median(samples),
        "p10": deciles[0],
        "p90": deciles[-1],
        "min": min(samples),
    }


def ratios(samples: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """A :func:`summary` of ``base`` over ``samples``, turn by turn."""
    return summary([theirs / ours for theirs, ours in zip(base, samples, strict=False)])


def measured(
    case: str,
    samples: Mapping[str, Sequence[float]],
    more: Callable[[dict[str, float]], Mapping[str, Mapping[str, Any]]] = lambda medians: {},
    fields: Mapping[str, Any] | None = None,
) -> Measured:
    """A case, with a row per candidate: its figures, and the further fields."""
    figures = {name: summary(found) for name, found in samples.items()}
    added = more({name: found["median"] for name, found in figures.items()})
    rows = [
        {**(fields or {}), "case": case, "candidate": name, **found, **added.get(name, {})}
        for name, found in figures.items()
    ]
    return Measured(case, samples, rows)


def measure(module: ModuleType, plan: Plan, options: Options) -> Iterator[Measured]:
    """The cases of ``plan``, a part of a benchmark's, in its order."""
    if hasattr(module, "measure"):
        yield from module.measure(plan, options)
        return
    for case, names in plan.items():
        threads = torch.get_num_threads()
        turns = None
        try:
            turns = module.turns(case, names, options)
            samples = alternate(turns.runners, warmup=turns.warmup, rounds=turns.rounds)
            found = measured(case, samples, turns.more, turns.fields)
        finally:
            torch.set_num_threads(threads)
            if turns is not None:
                turns.close()
                for runner in turns.runners.values():
                    getattr(runner, "close", lambda: None)()
        yield found
