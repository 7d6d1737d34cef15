"""What benchmarks have measured, as text: figures, pages, and README's summary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import harness, registry
from bench.report import pages, summary, tables

pytestmark = pytest.mark.project


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (1.234e-8, "12.3 ns"), (9.996e-7, "1 us"), (2.5e-6, "2.5 us"),
     (9.996e-4, "1 ms"), (0.0999949, "100 ms"), (0.99949, "999 ms"), (1234.5, "1230 s")],
)  # fmt: skip
def test_durations_have_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_a_marker_without_results_names_the_command_to_run() -> None:
    page = "<!-- bench:x -->\nold\n<!-- /bench -->"
    assert pages.update(page, {"x": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="make bench ARGS=x"):
        pages.update(page, {})
    of_gpu = page.replace(":x", ":gpu.x")
    assert pages.update(of_gpu, {}) == of_gpu.replace("old", "*Not measured on any GPU yet.*")


def test_pages_are_written_from_the_results_of_all_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:gpu.soak -->\n<!-- /bench -->")
    for gpu in ("one", "other"):
        monkeypatch.setenv("OUT", str(tmp_path / gpu))
        harness.save(
            "gpu.soak", [{"ranks": 2, "calls": 7, "wrong": 0, "seconds": 1.0}], {"on": gpu}
        )
        (tmp_path / gpu / f"{gpu}.json").write_text('{"format": 1, "entries": []}')
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [page])
    pages.main()
    assert page.read_text().count("| 2 | 7 | 0 | 1 |") == 2
    assert "on: one" in page.read_text() and "on: other" in page.read_text()


@pytest.mark.parametrize("line", summary.LINES, ids=lambda line: line.name)
def test_the_summary_names_candidates_that_there_are(line: summary.Line) -> None:
    there = {name for names in registry.find(line.name).CANDIDATES.values() for name in names}
    assert {line.ours, *line.instead} <= there


def test_the_summary_has_the_ratios_of_result_files() -> None:
    text = summary.table()
    for line in summary.LINES:
        if line.work in text:
            (row,) = (row for row in text.splitlines() if line.work in row)
            path = Path(registry.FOLDER.parent, re.findall(r"\]\((.*?)\)", row)[0])
            rows = json.loads(path.read_text())["rows"]
            rows = [each for each in rows if line.where.items() <= each.items()]
            medians = {each["candidate"]: each["median"] for each in rows}
            for name, label in line.instead.items():
                assert f"{label} {medians[name] / medians[line.ours]:.3g}" in row
