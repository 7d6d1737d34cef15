"""The exit code of the demo, and its verdicts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.project


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
