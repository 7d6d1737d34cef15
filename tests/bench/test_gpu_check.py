"""`make gpu-check` on the CPU: a step that hangs, chosen questions, and a dry run of the whole."""

import re
import sys
import time
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
