"""The demo runs with tiny sizes, refuses a bad argument, and fails if a check does."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.project

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.full  # The gate runs the demo itself.
@pytest.mark.timeout(120)
def test_quick_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo", "--quick", "--output", str(tmp_path)]
    run = subprocess.run(
        command, cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = [line.split("  ")[0] for line in run.stdout.splitlines()[-6:]]
    assert summary == ["faster", "not faster", "memory", "act 1", "act 2", "act 3"]
    llama = importlib.util.find_spec("transformers") is not None
    assert ("0 of 9 generations on ranks and in one process differ" in run.stdout) == llama
    assert "2 of 2 ranks wrote the 8 bytes that one process wrote" in run.stdout
    assert "FAILED" not in run.stdout
    rows = (tmp_path / "losses.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    actions = [event for event in trace if event["ph"] == "X"]
    assert len(actions) == 2 * 8 * 2  # Stages, chunks, forward and backward.
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from demo.__main__ import main

    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        main(["--output", str(file)])
    assert f"--output must name a folder, got the file {file}" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_exit_code_and_verdicts(
    failing: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from demo.__main__ import collectives, generate, main, memory, picture, train
    from demo.results import Check, SpeedUp

    for number, act in enumerate((train, generate, collectives)):
        result = SimpleNamespace(
            model=None,
            memory={memory.PIPED: 1.0, memory.UNPIPED: 4.0},
            speed_ups=[SpeedUp(f"work {number}", "peer", 1.0 + 0.04 * number)],
            checks=[Check(f"value {number} (limit 3)", number != failing)],
        )
        monkeypatch.setattr(act, "run", lambda *_, result=result: result)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    assert main(["--output", str(tmp_path)]) == (failing is not None)
    faster, others, memory_line, *acts = capsys.readouterr().out.splitlines()[-6:]
    assert faster == "faster      work 2 1.08x as fast as peer"
    assert "work 0 1.00x" in others and "work 1 1.04x" in others  # 1.04 is within noise.
    assert "0.25" in memory_line
    for number, line in enumerate(acts):
        verdict = "FAILED" if number == failing else "ok"
        assert line == f"act {number + 1}       {verdict}: value {number} (limit 3)"
