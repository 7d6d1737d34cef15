"""`make gpu-check` on the CPU: its steps, what a failure does, and a dry run of the whole."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from bench.gpu import check
from bench.gpu.check import Outcome, run_step

pytestmark = [pytest.mark.full, pytest.mark.project]


def python(code: str, seconds: float = 60.0) -> Outcome:
    """The outcome of a step."""
    command = [sys.executable, "-c", f"import os, sys, time; {code}"]
    return run_step("it", command, {"X": "there"}, time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("code", "status", "note"),
    [
        ("print('out'); print('note: 3 wins')", "passed", "3 wins"),
        ("print('out'); print(os.environ['X']); sys.exit(3)", "failed", "exit status 3: there"),
        (f"print('no such GPU'); sys.exit({check.SKIPPED})", "skipped", "no such GPU"),
    ],
)
def test_a_step_has_a_status_and_a_note(code: str, status: str, note: str) -> None:
    found = python(code)
    assert (found.status, found.note, found.good) == (status, note, status != "failed")


def test_a_hanging_step_says_where_and_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "def stuck(): time.sleep(600)\n"
        "stuck()"
    )
    outcome = python(code, 4.0)
    assert outcome.status == "timed out" and not outcome.good
    assert "in stuck" in outcome.output
    status = Path("/proc", pid.read_text(), "status")
    deadline = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert python("", -1.0).status == "not run"


@pytest.mark.parametrize(
    ("status", "ended", "found"),
    [
        ("passed", "PASSED", "passed"),
        ("passed", "SKIPPED", "failed"),
        ("timed out", "PASSED", "not run"),
        ("timed out", "FAILED", "timed out"),
    ],
)
def test_a_run_of_pytest_has_the_outcomes_of_its_tests(status: str, ended: str, found: str) -> None:
    output = f"[gw1] [  1%] {ended} tests/a.py::t\n"
    assert check.tested(Outcome("x", status, output=output), must_run=True).status == found


def test_the_first_files_are_there_and_pytest_takes_the_options() -> None:
    assert {*check.FIRST} <= {*check.cuda_files()}
    command = check.pytest_command(9, 1, ["--collect-only", "-m", "cuda", *check.FIRST[1:2]])
    assert run_step("it", command, {}, time.monotonic() + 60.0).status == "passed"


@pytest.mark.parametrize("failing", [None, "gpu.pipe", "build", "memcheck"])
def test_a_failing_step_is_reported_and_stops_no_other(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: dict[str, list[str]] = {}

    def step(
        name: str, command: Sequence[str], environment: Mapping[str, str], deadline: float
    ) -> Outcome:
        assert deadline < time.monotonic() + sum(check.SHARES.values()) <= time.monotonic() + 480
        commands[name] = list(command)
        status = "failed" if name == failing else "passed"
        return Outcome(name, status, 1.0, output="[gw0] [  9%] PASSED tests/a.py::t")

    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(check.shutil, "which", lambda program, path: program)
    monkeypatch.setattr(check, "run_step", step)
    made = check.Check(tmp_path, "90")
    # What compute-sanitizer finds is shown, and fails nothing.
    assert made.run() == (failing in (None, "memcheck"))
    outcomes = [*made.outcomes, *made.sanitized]
    assert [each.name for each in outcomes if each.status == "failed"] == [failing] * bool(failing)
    expected = {*check.SHARES, *(name for name, *_ in (*check.MARKED, *check.SANITIZERS))}
    missing = {"sanitizers"} | ({"kernels"} if failing == "build" else set())
    assert expected - missing <= set(commands)
    assert commands["racecheck"][:3] == ["compute-sanitizer", "--tool", "racecheck"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert "==== summary" in log and (failing is None or f"{failing:<26} failed" in log)


@pytest.mark.timeout(540)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_reports_every_step(capfd: pytest.CaptureFixture[str]) -> None:
    check.main(["--dry-run", "--built"])
    summary = capfd.readouterr().out.partition("==== summary")[2]
    for step in set(check.SHARES) - {"build", "kernels", "sanitizers"}:
        line = rf"^{re.escape(step)} +(passed|skipped|timed out|failed) "
        assert re.search(line, summary, re.MULTILINE), step
    assert "not run for lack of time: nothing" in summary


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_reports_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 1
    assert "sees no CUDA GPU" in capsys.readouterr().err
