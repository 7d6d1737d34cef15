"""The quick tests start no process; every test is in one level."""

import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from support import times

ROOT = Path(__file__).parents[1]
LEVELS = ("QUICK", "GATE", "ALL")


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=False),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: os.fork(),  # Not os.fork itself, which the fixture patches later.
    ],
    ids=["subprocess", "multiprocessing", "fork"],
)
def test_a_test_without_a_marker_may_not_start_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="starts a process; give it one of the markers"):
        start()


def expressions() -> dict[str, str]:
    """The levels of the Makefile, each the tests that pytest selects for it."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    return {name: re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)[0] for name in LEVELS}


def registered() -> list[str]:
    """The markers of the project."""
    return re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def selects(expression: str, markers: tuple[str, ...]) -> bool:
    return bool(eval(expression, {name: name in markers for name in registered()}))


def test_every_combination_of_markers_is_in_a_level_and_each_level_in_the_next() -> None:
    quick, gate, everything = expressions().values()
    names = registered()
    sets = chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    for markers in sets:
        assert selects(everything, markers) or "weekly" in markers, markers
        assert selects(everything, markers) >= selects(gate, markers) >= selects(quick, markers)
    assert selects(quick, ("cuda",)) and not selects(gate, ("full",))


def test_every_function_that_looks_like_a_test_is_one() -> None:
    """In a file that pytest collects, or that a collected test runs in another process."""
    tests = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    runs = re.compile(r'run_(?:interpreted|apart)\(\s*"(.*?)"')
    run = {name for text in tests.values() for name in runs.findall(text)}
    for name, text in tests.items():
        collected = name.startswith("test_") or name in run
        assert collected or not re.search(r"^(async )?def test_", text, re.MULTILINE), name


def test_a_test_of_two_levels_is_refused(pytestconfig: pytest.Config) -> None:
    def item(*markers: str) -> SimpleNamespace:
        marked = [SimpleNamespace(name=name) for name in markers]
        path = Path("test_x.py")
        return SimpleNamespace(nodeid="x", path=path, iter_markers=lambda: marked)

    conftest.pytest_collection_modifyitems(pytestconfig, [item("slow", "full"), item("weekly")])
    with pytest.raises(pytest.UsageError, match="x is in two levels: .*choose one"):
        conftest.pytest_collection_modifyitems(pytestconfig, [item("weekly", "full")])


def test_the_table_of_times() -> None:
    case = '<testcase classname="tests.{}" name="{}" time="{}" />'
    cases = [case.format("test_y", "r", 0.5), case.format("a.test_x", "p", 1)]
    cases += [case.format("a.test_x", "q", 2.5)]
    report = f'<testsuites><testsuite time="2.0">{"".join(cases)}</testsuite></testsuites>'
    lines = [line.split() for line in times.table(report).splitlines()]
    assert lines[1] == ["3.5", "2", "tests/a/test_x", "(q", "2.5)"]
    assert lines[2][:3] == ["0.5", "1", "tests/test_y"]
    assert lines[3][:1] == ["4.0"] and lines[3][-4] == "2.0"
