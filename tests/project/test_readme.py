"""The programs of README; tests/bench/test_bench.py checks its figures."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import run_program
from torch import nn

from pipekernels import Pipe

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


# What a user pastes: files written by the shell.
PROGRAMS = dict(
    re.findall(r"^cat > (\w+\.py) <<'END'\n(.*?)^END\n", PAGE, re.MULTILINE | re.DOTALL)
)
SHOWN = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)  # What they print, in this order.
RANKS = 2


def test_the_number_of_families_is_that_of_their_page() -> None:
    (count,) = re.findall(r"\[(\d+) families\]\(docs/families.md\)", PAGE)
    assert f": {count} are sharded;" in (ROOT / "docs" / "families.md").read_text()


def test_the_pipe_has_loss_and_gradients_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(PROGRAMS["pipe.py"], names)  # noqa: S102
    assert capsys.readouterr().out == f"{SHOWN[2]}\n"
    assert isinstance(names["pipe"], Pipe) and names["pipe"].balance == [2, 2]
    model, x, target = (names[name] for name in ("model", "x", "target"))
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    expected = (loss, *(p.grad for p in model.parameters()))
    torch.testing.assert_close((names["loss"], *gradients), expected)
    (step,) = re.findall(r"`(pipe\.train_step\(.*?\))`", PAGE)
    torch.testing.assert_close(eval(step, names), loss.detach())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("file", "shown"), [*zip(PROGRAMS, SHOWN, strict=True)][:2])
def test_programs_of_ranks_print_on_rank_0_alone(file: str, shown: str, tmp_path: Path) -> None:
    if "transformers" in PROGRAMS[file]:
        pytest.importorskip("transformers")
    path = tmp_path / file
    path.write_text(PROGRAMS[file])
    lines = run_program(path, folder=tmp_path, ranks=RANKS).splitlines()
    of_any_values = re.sub(r"(\\\.)?\d+", r"[\\d.]+", re.escape(shown))  # Torch's versions differ.
    assert len([line for line in lines if re.fullmatch(of_any_values, line)]) == 1, lines
