"""The demo runs with small sizes and refuses bad arguments."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_small_demo(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "demo", "--steps", "3", "--width", "32", "--context", "16"]
    run = subprocess.run(
        [*command, "--length", "8", "--output", str(tmp_path)],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "8 bytes generated split over 2 processes are the same" in run.stdout
    assert "FAILED" not in run.stdout
    with open(tmp_path / "losses.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    actions = [event for event in trace if event["ph"] == "X"]
    assert len(actions) == 2 * 8 * 2  # Stages, chunks, forward and backward.
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--seconds", "nan"], "--seconds must be positive, got nan"),
        (["--width", "30"], "--width must be a multiple of 4 heads, got 30"),
    ],
)
def test_arguments_that_would_train_nothing(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    from demo.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments)
    assert says in capsys.readouterr().err
