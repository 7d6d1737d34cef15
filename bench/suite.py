"""The cases of benchmarks, each measured when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bench import harness, records
from bench.harness import Measured, Options, Plan
from bench.registry import find, unit
from bench.report.tables import duration, size


class Suite:
    """Measures the cases of ``plans`` one after another, as they are asked for.

    Args:
        plans: by benchmark, what to measure.
        options: how.
        keep: whether to write the result file of a benchmark of which all cases are measured.
        tell: called with lines for the user.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        options: Options,
        *,
        keep: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._plans = plans
        self._options, self._keep, self._tell = options, keep, tell
        self._running: dict[str, Iterator[Measured]] = {}
        self._found: dict[str, list[Measured]] = {}

    def measured(self, name: str, case: str) -> Measured:
        """A case of the benchmark ``name``.

        Raises:
            RuntimeError: an earlier case of that benchmark has failed.
        """
        plan, module = self._plans[name], find(name)
        if name not in self._running:
            self._running[name] = harness.measure(module, plan, self._options)
            self._found[name] = []
            assert module.__doc__
            self._tell(f"\n{name}: {module.__doc__.splitlines()[0]}")
        found, cases = self._found[name], list(plan)
        while case not in [each.case for each in found]:
            self._tell(f"{name}: {cases[len(found)]} ({len(found) + 1} of {len(cases)})")
            each = next(self._running[name], None)
            if each is None:
                raise RuntimeError(f"{name} ended before {case!r}: an earlier test says why")
            found.append(each)
            if len(found) == len(cases):
                next(self._running[name], None)  # It ends its processes.
                self._finish(name)
        return next(each for each in found if each.case == case)

    def _finish(self, name: str) -> None:
        found, module = self._found[name], find(name)
        self._tell("\n" + ratio_table(found, module.BASE, unit(name)))
        whole = set(module.CANDIDATES) == set(self._plans[name])
        if self._keep and not self._options.quick and whole:
            rows = [row for each in found for row in each.rows]
            self._tell(f"{records.save(name, rows, module.CONDITIONS)}")

    def close(self) -> None:
        """End what has not been measured to its end."""
        for running in self._running.values():
            running.close()  # type: ignore[attr-defined]


def ratio_table(found: Sequence[Measured], base: str, unit: str) -> str:
    """Medians, and ratios with their spread, as plain text."""
    text = duration if unit == "seconds" else size
    lines = [["case", "candidate", "median", "p10 to p90", f"{base} / it", "p10 to p90"]]
    for each in found:
        for name, samples in each.samples.items():
            summary = harness.summary(samples)
            line = [each.case, name, text(summary["median"])]
            line.append(f"{text(summary['p10'])} to {text(summary['p90'])}")
            if base in each.samples:
                ratio = harness.ratios(samples, each.samples[base])
                line += [f"{ratio['median']:.2f}", f"{ratio['p10']:.2f} to {ratio['p90']:.2f}"]
            lines.append([*line, *[""] * (len(lines[0]) - len(line))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
