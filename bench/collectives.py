"""All-reduces from Python: ours against every peer that is installed, all of them alternately.

Every system has its own long-lived ranks (bench/peers/groups.py). In a system's turn each rank
rewrites its whole tensor and waits for a common start, outside the timed region; a call's time ends
when its slowest rank is done. Sums are checked before and after.

* ``ordinary``: ours on any tensor; ``symmetric``: on one of ``Communicator.empty``.
* The streaming bound: every rank at once reads as many bytes as its tensor has, and writes as many.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import Options, Plan, Row
from bench.peers import groups
from bench.peers.groups import Group, Session
from bench.peers.systems import ALGORITHMS
from bench.report.tables import between, markdown, microseconds, svg

RANKS = 2
SIZES = [2**exponent for exponent in range(10, 27, 2)]  # bytes
DTYPES = ["float32", "bfloat16"]
KINDS = ["ordinary", "symmetric"]
PEERS = ["DeepSpeed", "MPICH", "Open MPI", "Intel MPI", "Gloo"]
BOUNDS = ["copy", "in place"]
VISITS = 5  # To every size and dtype, spread over the run: hosts may be slow for a minute.
SECONDS = 2.5  # For all candidates in one visit, if that is enough for a round.

SUMS = [*KINDS, *(f"{kind} {name}" for kind in KINDS for name in ALGORITHMS)]
SIZE_CASES = {f"{dtype}, {size} bytes": (size, dtype) for dtype in DTYPES for size in SIZES}
CANDIDATES = dict.fromkeys(SIZE_CASES, (*SUMS, *PEERS, *BOUNDS))
QUICK = {f"float32, {1 << bits} bytes": [*KINDS, *PEERS, *BOUNDS] for bits in (10, 18, 22)}
BASE = "Gloo"
CONDITIONS = {
    "ranks": "processes of one intra-op thread, free to run on any core",
    "timing": f"systems in turn, {VISITS} visits to each size, slowest rank, medians; tensors "
    "rewritten before each call; turns warmed up",
}


# By candidate: its version, the seconds of each call, and the number of wrong elements.
Visit = dict[str, tuple[str, list[float], int]]
Calls = dict[str, tuple[Group, str]]  # By candidate: who makes them, and in which version.


def turn_for(size: int) -> tuple[int, int, int]:
    """Rounds in a visit, and in each turn the number of warm-up calls and of measured calls.

    The turns of other systems leave caches and predictors cold; short calls need a long warm-up.
    """
    if size <= 1 << 18:
        return 5, 100, 20
    return (4, 2, 10) if size <= 1 << 22 else (3, 3, 3)


def prepare(session: Session, size: int, dtype: str, names: Sequence[str]) -> Calls:
    """The candidates among ``names`` that take tensors of ``size`` bytes."""
    return {
        candidate: (group, version)
        for group, version in session.values()
        for candidate in group.call("prepare", size=size, dtype=dtype)[0]
        if candidate in names
    }


def check(calls: Calls) -> dict[str, int]:
    """The number of wrong elements on all ranks together."""
    return {
        candidate: sum(group.call("check", candidate=candidate))
        for candidate, (group, _) in calls.items()
    }


def slowest(answers: list[list[int]]) -> list[float]:
    """Seconds of each call from the nanoseconds of each call on each rank."""
    return [max(times) * 1e-9 for times in zip(*answers, strict=True)]


def sample(calls: Calls, size: int, visit: int, quick: bool) -> dict[str, list[float]]:
    """Seconds of each call, by candidate; all of them take turns."""
    rounds, warmup, count = turn_for(size)

    def turn(name: str) -> list[float]:
        group, _ = calls[name]
        return slowest(group.call("measure", candidate=name, warmup=warmup, calls=count))

    turns = {name: lambda name=name: turn(name) for name in calls}
    start = visit * rounds
    begin = time.monotonic()
    samples = harness.alternate(turns, warmup=0, rounds=1, start=start)
    possible = int(SECONDS / (time.monotonic() - begin))
    rounds = 2 if quick else min(rounds, possible)
    more = harness.alternate(turns, warmup=0, rounds=max(0, rounds - 1), start=start + 1)
    return {name: samples[name] + more[name] for name in calls}


def by_size(session: Session, plan: Plan, quick: bool) -> list[list[Row]]:
    """Cases of :data:`SIZE_CASES`; bandwidths in GB/s, as nccl-tests defines them."""
    visits: dict[str, list[Visit]] = {case: [] for case in plan}
    for visit in range(1 if quick else VISITS):
        for case, names in plan.items():
            print(f"{case}, visit {visit + 1}", flush=True)
            work = partial(_visit, *SIZE_CASES[case], names, visit, quick)
            visits[case].append(groups.survived(session, work))
    return [_rows(case, visits[case]) for case in plan]


def _visit(
    size: int, dtype: str, names: Sequence[str], visit: int, quick: bool, session: Session
) -> Visit:
    calls = prepare(session, size, dtype, names)
    wrong = check(calls)
    samples = sample(calls, size, visit, quick)
    wrong_after = check(calls)
    return {
        name: (version, samples[name], wrong[name] + wrong_after[name])
        for name, (_, version) in calls.items()
    }


def _rows(case: str, visits: list[Visit]) -> list[Row]:
    size, dtype = SIZE_CASES[case]
    rows = []
    for name in visits[0]:
        versions, times, wrong = zip(*(v[name] for v in visits if name in v), strict=True)
        figures: Row = harness.summary([*itertools.chain(*times)])
        figures["algbw"] = size / figures["median"] / 1e9
        figures["busbw"] = figures["algbw"] * 2 * (RANKS - 1) / RANKS
        figures["wrong"] = sum(wrong)
        of = {"candidate": name, "version": versions[0], "size": size, "type": dtype}
        rows.append({"part": "sizes", **of, **figures})
    return rows


def measure(plan: Plan, options: Options) -> Iterator[list[Row]]:
    """All sizes."""
    with groups.session(["pipekernels", *PEERS, "streaming"], RANKS) as session:
        yield from by_size(session, plan, options.quick)


# ---- tables ----


Cases = dict[tuple[str, int], dict[str, Row]]  # By dtype and size: rows by candidate.


def cases_of(rows: Sequence[Row]) -> Cases:
    """The rows of one call after another."""
    cases: Cases = {}
    for found in rows:
        if found["part"] == "sizes":  # Earlier result files have other parts.
            cases.setdefault((found["type"], found["size"]), {})[found["candidate"]] = found
    return cases


def table(rows: list[Row], others: Sequence[list[Row]] = ()) -> str:
    """Tables of all parts, of one machine; the means of all."""
    cases = cases_of(rows)
    versions = {found["candidate"]: found["version"] for found in rows}
    there = [name for name in PEERS if name in versions]
    parts = {
        f"{kind.capitalize()} tensors, {RANKS} ranks; us and GB/s": _ours(cases, kind)
        + _means([cases, *map(cases_of, others)], kind)
        for kind in KINDS
    }
    told = ", ".join(f"{name} {versions[name]}" for name in there)
    parts[f"Peers: {told}; us"] = _side_by_side(cases, there)
    alone = [name for name in SUMS if name.startswith(KINDS[0])]
    parts["Ordinary tensors: `auto` beside each algorithm; us"] = _side_by_side(cases, alone)
    return "\n\n".join(f"**{title}**\n\n{body}" for title, body in parts.items())


def _best(found: dict[str, Row], names: list[str]) -> Row:
    return min((found[name] for name in names if name in found), key=lambda r: r["median"])


def _ours(cases: Cases, kind: str) -> str:
    """Time and bandwidth, and how many times the speed of the best peer that is; of the bound,
    which is to read and write as many bytes."""
    header = ["size (B)", "type", "time", "busbw", "best peer", "x best peer", "of bound"]
    lines = []
    for found in cases.values():
        ours, peer = found[kind], _best(found, PEERS)
        line = [str(ours["size"]), ours["type"], microseconds(ours), f"{ours['busbw']:.2f}"]
        line += [peer["candidate"], f"{peer['median'] / ours['median']:.2f}"]
        lines.append([*line, f"{_best(found, BOUNDS)['median'] / ours['median']:.0%}"])
    return markdown(header, lines)


def _means(machines: list[Cases], kind: str) -> str:
    means = [
        statistics.geometric_mean(
            _best(found, PEERS)["median"] / found[kind]["median"] for found in cases.values()
        )
        for cases in machines
    ]
    spread = f"; on all machines {between(means)}" * (len(means) > 1)
    return f"\n\nGeometric mean of x best peer: {means[0]:.2f}{spread}."


def _side_by_side(cases: Cases, names: list[str]) -> str:
    lines = [
        [str(size), dtype, *(microseconds(found.get(name)) for name in names)]
        for (dtype, size), found in cases.items()
    ]
    return markdown(["size (B)", "type", *names], lines)


# ---- plot ----


def plot(rows: list[Row], path: Path) -> None:
    """Bus bandwidth over size, an axis per dtype, as an SVG file."""
    with svg(path, len(DTYPES)) as axes:
        for axis, dtype in zip(axes, DTYPES, strict=True):
            for index, name in enumerate([*KINDS, *PEERS]):
                found = [
                    r for r in rows
                    if (r["part"], r["type"], r["candidate"]) == ("sizes", dtype, name)
                ]  # fmt: skip
                style: dict[str, Any] = {"linewidth": 2.5} if name in KINDS else {"linestyle": "--"}
                if found:
                    sizes, speeds = [r["size"] for r in found], [r["busbw"] for r in found]
                    label = f"pipekernels, {name} tensors" if name in KINDS else name
                    axis.plot(sizes, speeds, marker=".", color=f"C{index}", label=label, **style)
            axis.set(title=f"all-reduce, {dtype}, {RANKS} ranks", xlabel="bytes")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axes[0].set_ylabel("bus bandwidth in GB/s")
        axes[0].legend()
