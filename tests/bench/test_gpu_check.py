"""`make gpu-check` on the CPU: its steps, what a failure does, and a dry run of the whole."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support import TIMEOUT

from bench.gpu import check
from bench.gpu.check import Outcome, run_step

pytestmark = [pytest.mark.full, pytest.mark.project]


def python(code: str, seconds: float = 60.0) -> Outcome:
    """The outcome of a step."""
    command = [sys.executable, "-c", f"import os, sys, time; {code}"]
    return run_step("it", command, {"X": "there"}, time.monotonic() + seconds)


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
    while status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.05)
    assert python("", -1.0).status == "not run"


@pytest.mark.parametrize("failing", [None, "gpu.pipe", "extension", "build", "memcheck"])
def test_a_failing_question_is_reported_and_stops_no_other(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: dict[str, list[str]] = {}
    begin = time.monotonic()

    def step(
        name: str, command: Sequence[str], environment: Mapping[str, str], deadline: float
    ) -> Outcome:
        assert deadline < begin + 1 + check.MOST
        commands[name] = list(command)
        fails = name == failing or (name == "extension" and failing == "build")
        output = "[gw0] [  9%] PASSED tests/a.py::t"
        return Outcome(name, "failed" if fails else "passed", 1.0, output=output)

    monkeypatch.setattr(check.shutil, "which", lambda program, path: program)
    monkeypatch.setattr(check, "run_step", step)
    asked = check.questions(check.QUESTIONS)
    # What compute-sanitizer finds is shown, and fails nothing; an extension may be missing.
    made = check.Check(tmp_path, "90")
    assert made.run(asked) == (failing not in ("gpu.pipe", "build"))
    names = {question.name for question in asked}
    built = {"build", "built extension"} if failing in ("extension", "build") else set()
    assert set(commands) == {"extension"} | built | names
    assert commands["racecheck"][-1].startswith(
        "compute-sanitizer --error-exitcode 86 --tool racech"
    )
    limit = commands["gpu.soak"][commands["gpu.soak"].index("--seconds") + 1]
    assert check.MOST - 60 < int(limit) < check.MOST  # All that is left.
    log = (tmp_path / "gpu_check.log").read_text()
    assert "==== summary" in log and (failing is None or f"{failing:<26} failed" in log)
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [each["name"] for each in saved] == [each.name for each in made.outcomes]
    assert (tmp_path / "clocks.csv").exists()


def test_questions_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [each.name for each in check.questions(check.QUESTIONS, ["repeat"])] == ["repeat"]
    own = tmp_path / "own.toml"
    own.write_text("prelude = 'x = 1;'\n[[question]]\nname = 'mine'\ncode = 'print(x)'\n")
    (mine,) = check.questions(own)
    outcome = run_step("it", mine.command(9, dry=True), {}, time.monotonic() + TIMEOUT)
    assert outcome.output == "1\n"
    with pytest.raises(SystemExit):
        check.main(["--questions", str(own), "--only", "mine", "other"])
    assert "no question other; there are mine" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_asks_every_question(capfd: pytest.CaptureFixture[str]) -> None:
    check.main(["--dry-run"])
    summary = capfd.readouterr().out.partition("==== summary")[2]
    for question in check.questions(check.QUESTIONS):
        line = rf"^{re.escape(question.name)} +(passed|skipped) "
        assert re.search(line, summary, re.MULTILINE), question.name
    assert "not run for lack of time: nothing" in summary
