"""README's programs, links, commands and names."""

from __future__ import annotations

import os
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipekernels
from pipekernels import Communicator

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_programs_run_one_after_the_other() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)]
    x, target = torch.randn(16, 512), torch.randn(16, 512)
    names: dict[str, Any] = {name: getattr(pipekernels, name) for name in pipekernels.__all__}
    names |= {"x": x, "target": target, "loss_fn": nn.functional.mse_loss, "tensor": torch.ones(3)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for program in PROGRAMS:
            if "plan_pipeline" in program:
                names |= {"model": nn.Sequential(*layers), "sample": x}
            exec(program, names)  # noqa: S102
            # The following programs use this pipe.
            names["pipe"] = names.get("pipe", names["model"])
    finally:
        dist.destroy_process_group()
    assert isinstance(names["comm"], Communicator)
    expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), target)
    torch.testing.assert_close(names["loss"], expected.detach())


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
