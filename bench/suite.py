"""The cases of benchmarks, each measured when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench import harness, records
from bench.harness import Measured, Options, Plan
from bench.registry import find, unit
from bench.report.tables import duration, markdown, size


class Suite:
    """Measures the cases of ``plans`` as they are asked for.

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
        self._plans, self._options, self._keep, self._tell = plans, options, keep, tell
        self._found: dict[str, dict[str, Measured | Exception]] = {name: {} for name in plans}

    def measured(self, name: str, case: str) -> Measured:
        """A case of the benchmark ``name``; with it all others, if they are measured together.

        Raises:
            Exception: that of the case, again for each of its candidates.
        """
        module, found, plan = find(name), self._found[name], self._plans[name]
        if not found:
            assert module.__doc__
            self._tell(f"\n{name}: {module.__doc__.splitlines()[0]}")
        if case not in found:
            cases = plan if hasattr(module, "measure") else {case: plan[case]}
            self._tell(f"{name}: {', '.join(cases)} ({len(found) + len(cases)} of {len(plan)})")
            found |= dict.fromkeys(cases, RuntimeError(f"{name} ended before this case"))
            try:
                for each in harness.measure(module, cases, self._options):
                    found[each.case] = each
            except Exception as error:  # noqa: BLE001 - raised below
                found[case] = error
            if len(found) == len(plan):
                self._finish(name)
        one = found[case]
        if isinstance(one, Exception):
            raise one
        return one

    def _finish(self, name: str) -> None:
        module = find(name)
        found = [each for each in self._found[name].values() if isinstance(each, Measured)]
        self._tell("\n" + ratio_table(found, module.BASE, unit(name)))
        whole = {each.case for each in found} == set(module.CANDIDATES)
        if self._keep and not self._options.quick and whole:
            by_case = {each.case: each.rows for each in found}
            rows = [row for case in self._plans[name] for row in by_case[case]]
            self._tell(f"{records.save(name, rows, module.CONDITIONS)}")


def ratio_table(found: Sequence[Measured], base: str, unit: str) -> str:
    """Medians, and ratios with their spread."""
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
    return markdown(lines[0], lines[1:])
