"""The demo runs with tiny sizes, and fails if a check does."""

import importlib.util
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
    llama = importlib.util.find_spec("transformers") is not None
    assert ("0 of 9 generations on ranks and in one process differ" in run.stdout) == llama
    assert "2 of 2 ranks wrote the 8 bytes that one process wrote" in run.stdout
    assert "FAILED" not in run.stdout
    files = {path.name for path in tmp_path.iterdir()}
    assert {"losses.csv", "timeline.json", "demo.png"} <= files


@pytest.mark.parametrize("failing", [None, 1])
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
            memory={memory.PIPED: 1.0, memory.ACCUMULATED: 0.5, memory.UNPIPED: 4.0},
            speed_ups=[SpeedUp(f"work {number}", "peer", 1.0 + 0.04 * number)],
            checks=[Check(f"value {number} (limit 3)", number != failing)],
        )
        monkeypatch.setattr(act, "run", lambda *_, result=result: result)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    assert main(["--output", str(tmp_path)]) == (failing is not None)
    faster, others, _, *acts = capsys.readouterr().out.splitlines()[-6:]
    assert "work 2 1.08x" in faster and "work 1 1.04x" in others  # 1.04 is within noise.
    assert [" FAILED: " in line for line in acts] == [number == failing for number in range(3)]
