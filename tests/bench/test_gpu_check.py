"""`make gpu-check` on the CPU: steps, tests in processes, and the whole."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import python as run_python

from bench import registry
from bench.gpu import check
from bench.gpu.check import Outcome, run_step

GPU = [name for name in registry.GPU if name in check.SHARES]
pytestmark = [pytest.mark.full, pytest.mark.project]


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "status", "note"),
    [
        ("print('out'); print('note: 3 wins')", "passed", "3 wins"),
        ("print('out'); print(os.environ['X']); sys.exit(3)", "failed", "exit status 3: there"),
        (f"print('no such GPU'); sys.exit({check.SKIPPED})", "skipped", "no such GPU"),
    ],
)
def test_a_step_has_a_status_and_a_note(code: str, status: str, note: str) -> None:
    found = run_step("it", python(f"import os, sys; {code}"), {"X": "there"}, in_seconds(60))
    assert (found.status, found.note, found.good) == (status, note, status != "failed")
    assert status == "skipped" or found.output.startswith("out\n")


def test_a_hanging_step_says_where_and_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "def stuck(): time.sleep(600)\n"
        "stuck()"
    )
    outcome = run_step("hang", python(code), {}, in_seconds(4))
    assert outcome.status == "timed out" and not outcome.good
    assert "in stuck" in outcome.output
    child = Path(f"/proc/{pid.read_text()}/stat")
    deadline = in_seconds(20)
    while child.exists() and time.monotonic() < deadline:
        if child.read_text().rpartition(") ")[2].startswith("Z"):
            return
        time.sleep(0.05)
    assert not child.exists()


def test_a_step_that_cannot_start_or_has_no_time_says_so() -> None:
    absent = run_step("none", ["/no/such/program"], {}, in_seconds(60))
    assert absent.status == "failed" and "/no/such/program" in absent.note
    late = run_step("late", python(""), {}, in_seconds(-1))
    assert (late.status, late.note, late.good) == ("not run", "no time was left for it", True)


def test_a_process_that_the_driver_holds_ends_the_use_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "PATIENCE", 0.2)
    monkeypatch.setattr(check, "unkillable", [])
    monkeypatch.setattr(check, "_signal", lambda process, number: None)  # As if it had none.
    stuck = run_step("stuck", python("import time; time.sleep(600)"), {}, in_seconds(1))
    [pid] = check.unkillable
    try:
        assert (stuck.status, stuck.good) == ("unkillable", False)
        assert stuck.note.startswith(f"process {pid} did not end after SIGKILL")
        after = run_step("after", python(""), {}, in_seconds(60))
        assert (after.status, after.note) == ("not run", f"process {pid} holds the GPU")
    finally:
        os.kill(pid, signal.SIGKILL)


TESTS = """
import os, time, pytest, torch

@pytest.mark.cuda
def test_good(): pass

@pytest.mark.cuda
@pytest.mark.parametrize("x", ["a", "c"])
def test_bad(x): assert x == "c"

@pytest.mark.cuda
def test_crash(): os._exit(7)

@pytest.mark.cuda
def test_hang(): time.sleep(600)

@pytest.mark.cuda
def test_skipped(): pytest.skip("no reason")

@pytest.mark.cuda
def test_broken():
    def fail(): raise RuntimeError("an illegal access")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fail

def test_on_the_cpu(): pass

@pytest.mark.cuda
def test_last(): pass
"""


@pytest.fixture
def tests() -> Any:
    """A file of tests beside the others, for their fixtures."""
    file = check.ROOT / "tests" / "bench" / f"test_of_a_check_{os.getpid()}.py"
    file.write_text(TESTS)
    yield str(file.relative_to(check.ROOT))
    file.unlink()


def test_a_test_that_breaks_its_process_does_not_affect_others(tests: str) -> None:
    pytest.importorskip("xdist")
    command = check.pytest_command(5, ["-m", "cuda", "-n", "2", tests])
    found = check.tested(run_step("tests", command, {}, in_seconds(100)), must_run=True)
    assert found.status == "failed", found.output
    counts, *names = found.note.split("; ")
    assert counts == "4 failed, 4 passed, 1 skipped", found.output
    assert {name.partition("::")[2] for name in names} == {
        "test_bad[a]", "test_crash", "test_hang", "test_broken"
    }  # fmt: skip
    assert "an illegal access" in found.output


PASSED, SKIPPED = "[gw1] [  1%] PASSED tests/a.py::t\n", "tests/a.py::t[1] SKIPPED (no) [ 9%]\n"


@pytest.mark.parametrize(
    ("status", "output", "must_run", "found"),
    [
        ("passed", PASSED, True, ("passed", "1 passed")),
        ("passed", SKIPPED, True, ("failed", "1 skipped")),
        ("passed", SKIPPED, False, ("skipped", "1 skipped")),
        ("timed out", PASSED, True, ("not run", "1 passed; no time was left for the others")),
        (
            "timed out",
            f"{PASSED}[gw0] [  2%] FAILED tests/b.py::u\n",
            True,
            ("timed out", "1 failed, 1 passed; tests/b.py::u"),
        ),
        ("failed", "no module named torch", True, ("failed", "why")),
    ],
)
def test_a_run_of_pytest_has_the_outcomes_of_its_tests(
    status: str, output: str, must_run: bool, found: tuple[str, str]
) -> None:
    outcome = check.tested(Outcome("x", status, 1.0, "why", output), must_run=must_run)
    assert (outcome.status, outcome.note) == found


def test_smoke_names_tests_that_there_are() -> None:
    tests = [test.replace("{device}", "cuda") for test in check.SMOKE.values()]
    options = ["-q", "-p", "no:cacheprovider", "--collect-only"]
    run_python("-m", "pytest", *options, *tests, cwd=check.ROOT)
    assert {*check.FIRST} <= {*check.cuda_files()}


class Calls:
    """Replaces ``run_step``: records commands and environments; the steps ``failing`` fail."""

    def __init__(self, failing: set[str]) -> None:
        self.commands: dict[str, list[str]] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self._failing = failing

    def __call__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], deadline: float
    ) -> Outcome:
        assert time.monotonic() < deadline < in_seconds(sum(check.SHARES.values()))
        self.commands[name], self.environments[name] = list(command), environment
        status = "failed" if name in self._failing else "passed"
        return Outcome(name, status, 1.0, output="[gw0] [  9%] PASSED tests/a.py::t")


@pytest.fixture
def check_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the check with steps that fail: whether it succeeds, its calls, each step's status."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(check, "_sanitizer", lambda: "compute-sanitizer")

    def run(*failing: str, built: bool = False) -> tuple[bool, Calls, dict[str, str]]:
        calls, made = Calls({*failing}), check.Check(tmp_path, "90", 132)
        monkeypatch.setattr(check, "run_step", calls)
        good = made.run(built=built)
        return good, calls, {each.name: each.status for each in [*made.outcomes, *made.sanitized]}

    return run


def test_all_steps_are_run_for_the_gpu_at_hand(
    check_with: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, calls, outcomes = check_with()
    assert good and set(outcomes.values()) == {"passed"}
    assert set(check.SHARES) - {"sanitizers"} <= set(outcomes) and set(GPU) <= set(calls.commands)
    assert calls.environments["build"]["CUDAARCHS"] == "90"
    order = list(calls.commands)
    assert order[:4] == ["environment", "build", "kernels", "extension"]
    assert set(order[4:15]) == set(check.SMOKE)
    assert order.index("tuner's kernels") < order.index("gpu.micro_batch")
    assert calls.commands["tuner's kernels"][-2:] == ["90", "132"]
    alone = calls.commands["tests of ranks"]
    assert alone[alone.index("-n") + 1] == "1"  # One at a time.
    racecheck = calls.commands["racecheck"]
    assert racecheck[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert racecheck[5:7] == ["--racecheck-detect-level", "error"]
    assert set(order[-4:]) == {name for name, *_ in check.SANITIZERS}
    assert sum(check.SHARES.values()) <= 480 and check.SHARES["smoke"] < 60
    assert len(["gpu_check.log", *GPU, "the tuner's table"]) == 8
    for printed in (capsys.readouterr().out, (tmp_path / "gpu_check.log").read_text()):
        assert "gpu.micro_batch            passed" in printed
        before, sanitized = printed.split("compute-sanitizer (fails nothing):\n")
        assert "racecheck" in sanitized and "racecheck" not in before.partition("summary")[2]


@pytest.mark.parametrize("failing", ["gpu.micro_batch", "build", "environment", "copy", "tests"])
def test_a_failing_step_is_reported_and_does_not_stop_others(
    failing: str, check_with: Callable[..., Any]
) -> None:
    good, calls, outcomes = check_with(failing)
    assert not good
    assert {GPU[-1], *(name for name, *_ in check.SANITIZERS)} <= set(calls.commands)
    step = "smoke" if failing in check.SMOKE else failing
    assert [name for name, status in outcomes.items() if status == "failed"] == [step]


def test_what_sanitizers_find_fails_nothing(check_with: Callable[..., Any]) -> None:
    good, _, outcomes = check_with("memcheck")
    assert good and outcomes["memcheck"] == "failed" and outcomes["racecheck"] == "passed"


def test_an_extension_built_before_needs_no_build(check_with: Callable[..., Any]) -> None:
    good, calls, _ = check_with(built=True)
    assert good and "build" not in calls.commands and "gpu.pipe" in calls.commands


def test_without_an_extension_nothing_else_is_run(check_with: Callable[..., Any]) -> None:
    good, calls, _ = check_with("build", "extension")
    assert not good and set(calls.commands) == {"environment", "build", "extension"}


@pytest.mark.timeout(540)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_reports_every_step(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    check.main(["--dry-run", "--built"])
    assert time.monotonic() - begin < 490
    summary = capfd.readouterr().out.partition("==== summary")[2]
    for step in set(check.SHARES) - {"build", "kernels", "sanitizers"}:
        assert re.search(
            rf"^{re.escape(step)} +(passed|skipped|timed out|failed) ", summary, re.MULTILINE
        ), step
    assert "not run for lack of time: nothing" in summary


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_reports_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 1
    assert "sees no CUDA GPU" in capsys.readouterr().err
