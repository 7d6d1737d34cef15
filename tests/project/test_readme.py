"""README's length, programs, links, commands and names."""

from __future__ import annotations

import os
import pkgutil
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


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_the_diff_makes_a_pipe_with_the_same_loss_and_gradients() -> None:
    (diff,) = blocks("diff")
    results: list[tuple[Any, ...]] = []
    for dropped in "+-":
        lines = [line[1:] for line in diff.splitlines() if not line.startswith(dropped)]
        names: dict[str, Any] = {}
        torch.manual_seed(0)
        exec("\n".join(lines), names)  # noqa: S102
        gradients = [p.grad for p in names["model"].parameters()]
        results.append((names["loss"].detach(), *gradients))
    assert not isinstance(names["model"], nn.Sequential) and isinstance(names["model"], Pipe)
    torch.testing.assert_close(*results)
    (step,) = re.findall(r"`(loss = model\.train_step\(.*?\))`", PAGE)
    names["model"].zero_grad()
    exec(step, names)  # noqa: S102
    torch.testing.assert_close(names["loss"].detach(), results[0][0])


@pytest.mark.processes
@pytest.mark.slow
def test_the_program_generates_the_same_tokens_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (program,) = blocks("python")
    pattern = r"^# torchrun --nproc-per-node[= ](\d+) program\.py$"
    (ranks,) = re.findall(pattern, program, re.MULTILINE)
    path = tmp_path / "program.py"
    path.write_text(program)
    printed = run_program(path, folder=tmp_path, ranks=int(ranks))
    tokens = re.findall(r"tensor\(\[\[([\d,\s]+)\]\]\)", printed)
    assert len(tokens) == 2 and len(set(tokens)) == 1
    assert len(tokens[0].split(",")) == 19


def test_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert links
    for link in links:
        assert os.path.exists(ROOT / link), link


def test_commands_and_names_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", PAGE, re.MULTILINE)
    assert commands and set(commands) <= targets
    for name in re.findall(r"`(pipekernels(?:\.\w+)+)", PAGE):
        assert pkgutil.resolve_name(name)
