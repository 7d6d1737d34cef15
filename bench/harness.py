"""Fair timing: the candidates of a case take turns; figures are medians with their spread."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

Turn = Callable[[], "float | Sequence[float] | None"]
Row = dict[str, Any]  # Of a result file.
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
    both = samples if len(samples) > 1 else [*samples, *samples]  # One has no quantiles.
    deciles = statistics.quantiles(both, n=10, method="inclusive")
    return {
        "median": statistics.median(samples),
        "p10": deciles[0],
        "p90": deciles[-1],
        "min": min(samples),
    }


def measure(module: ModuleType, plan: Plan, options: Options) -> Iterator[list[Row]]:
    """The rows of each case of ``plan``, a part of a benchmark's, in its order."""
    if hasattr(module, "measure"):
        yield from module.measure(plan, options)
        return
    for case, names in plan.items():
        threads = torch.get_num_threads()
        turns = None
        try:
            turns = module.turns(case, names, options)
            samples = alternate(turns.runners, warmup=turns.warmup, rounds=turns.rounds)
            figures = {name: summary(found) for name, found in samples.items()}
            more = turns.more({name: found["median"] for name, found in figures.items()})
        finally:
            torch.set_num_threads(threads)
            if turns is not None:
                turns.close()
                for runner in turns.runners.values():
                    getattr(runner, "close", lambda: None)()
        yield [
            {**turns.fields, "case": case, "candidate": name, **found, **more.get(name, {})}
            for name, found in figures.items()
        ]


def attempted(case: str, found: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The rows of ``found``; if it fails, the last one has its error, without the further lines
    that CUDA adds."""
    try:
        yield from found
    except Exception as error:  # noqa: BLE001 - recorded in the row
        print(traceback.format_exc(), flush=True)
        message = "".join(traceback.format_exception_only(error)).splitlines()[0]
        yield [{"case": case, "error": message}]
