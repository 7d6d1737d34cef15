"""What benchmarks have measured, as text: figures, pages, and README's summary."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench import harness, records, registry
from bench.distributed import ddp
from bench.report import pages, summary, tables

pytestmark = pytest.mark.project


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (1.234e-8, "12.3 ns"), (9.996e-7, "1 us"), (2.5e-6, "2.5 us"),
     (9.996e-4, "1 ms"), (0.0999949, "100 ms"), (0.99949, "999 ms"), (1234.5, "1230 s")],
)  # fmt: skip
def test_durations_have_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_result_files_name_no_path_of_the_machine() -> None:
    path = re.compile(r"""["'\s(]/\w+/\w""")
    files = list(records.RESULTS.rglob("*.json"))
    assert files and not [str(each) for each in files if path.search(each.read_text())]
    assert path.search('File "/home/someone/program.py"')


def test_a_marker_without_results_names_the_command_to_run() -> None:
    page = "<!-- bench:x -->\nold\n<!-- /bench -->"
    assert pages.update(page, {"x": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="make bench ARGS=x"):
        pages.update(page, {})
    of_gpu = page.replace(":x", ":gpu.x")
    assert pages.update(of_gpu, {}) == of_gpu.replace("old", "*Not measured on any GPU yet.*")


def row(case: str, candidate: str, median: float) -> dict[str, Any]:
    return {"case": case, "candidate": candidate, **harness.summary([median] * 3)}


def test_a_table_is_of_one_machine_with_the_range_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:ddp -->\n<!-- /bench -->")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [page])
    whole = {case: list(names) for case, names in ddp.CANDIDATES.items()}
    for day, (cpu, seconds, lacks) in enumerate((("Old", 2.0, ""), ("New", 4.0, "one thread"))):
        rows = [row(case, name, seconds if name == "DDP, pipekernels" else 6.0)
                for case, names in whole.items() for name in names if name != lacks]  # fmt: skip
        monkeypatch.setattr(records._cache, "now", lambda day=day: f"2026-01-0{day + 1}")
        monkeypatch.setattr(
            records, "machine", lambda cpu=cpu: {"cpu": cpu, "cores": 2, "torch": 1}
        )
        monkeypatch.setenv("OUT", str(tmp_path / cpu))
        path = records.save("ddp", rows, {"of": cpu})
        assert len(path.read_text().splitlines()) == len(rows) + 9  # A line for each row.
        (tmp_path / cpu / "tuned.json").write_text('{"format": 1, "entries": []}')
    pages.main()
    text = page.read_text()
    assert "**Old, 2 cores, torch 1**" in text and "Measured on New as well." in text
    assert "| 4 sequences | DDP, pipekernels | 2 s | 2 s to 2 s | 3.00 | 1.50 to 3.00 |" in text
    assert "| 4 sequences | DDP, Gloo | 6 s | 6 s to 6 s | 1.00 |  |" in text
    assert "of: Old" in text and "of: New" not in text


def test_ranges_are_of_ratios_to_what_older_files_have_too() -> None:
    new = [row("a", "one thread", 8.0), row("a", "two threads", 4.0), row("a", "ours", 5.0)]
    old = [row("a", "one thread", 9.0), row("a", "ours", 3.0)]
    header, _, one, two, ours = tables.table(new, [old], "two threads").splitlines()
    assert header.endswith("| two threads / it | one thread / it, on 2 machines |")
    assert one.endswith("| 0.50 |  |") and two.endswith("| 1.00 |  |")
    assert ours.endswith("| 0.80 | 1.60 to 3.00 |")


LINES = [*summary.WINS, *summary.LOSSES]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.work)
def test_the_summary_names_candidates_that_there_are(line: summary.Line) -> None:
    there = {name for names in registry.find(line.name).CANDIDATES.values() for name in names}
    assert {line.ours, *line.instead} <= there


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.work)
def test_the_summary_has_the_ratios_of_the_files_that_it_links(line: summary.Line) -> None:
    found = [each for each in summary.table([line]).splitlines() if line.work in each]
    for text in found:
        files = [Path(registry.FOLDER.parent, path) for path in re.findall(r"\]\((.*?)\)", text)]
        rows = [row for file in files for row in records.read(file)["rows"]]
        assert rows
        for name, label in line.instead.items():
            low, high = re.findall(f"{label} ([0-9.]+)(?: to ([0-9.]+))?", text)[0]
            for file in files:
                for each in summary.medians(records.read(file), line):
                    ratio = round(each.get(name, float(low) * each[line.ours]) / each[line.ours], 2)
                    assert float(low) <= ratio <= float(high or low)


def test_the_summary_has_the_slowest_kill_of_each_machine() -> None:
    assert re.search(
        r"slowest of 1000 such errors came after [\d.]+ ms to [\d.]+ ms,", summary.killed()
    )
