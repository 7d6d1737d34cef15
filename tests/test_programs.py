"""No process of :mod:`support.programs` outlives a failure, which is reported."""

import re
import time
from pathlib import Path

import pytest
from support.programs import run_program

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FAIL = """
import os, pathlib, subprocess, time

child = pathlib.Path("child")
if os.environ["RANK"] == "0":
    process = subprocess.Popen(["sleep", "1000"])
    child.write_text(str(process.pid))
    process.wait()
while not child.exists() or not child.read_text():
    time.sleep(0.01)
raise ValueError("on rank 1")
"""


@pytest.mark.timeout(90)  # Less than the limit of the program.
def test_a_failure_ends_all_ranks_and_what_they_have_started(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAIL)
    with pytest.raises(AssertionError, match="process 0 ended with -9") as caught:
        run_program(program, folder=tmp_path, ranks=2)
    assert re.search("process 1 ended with 1:.*ValueError: on rank 1", str(caught.value), re.DOTALL)
    status = Path("/proc", (tmp_path / "child").read_text(), "status")
    while status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.01)
