"""The extension's functions refuse bad arguments and do not crash."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_calls import GROUPS
from support.programs import python

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]


def last_line_of(module: str, *arguments: str) -> Any:
    """Run ``python -m support.MODULE ARGUMENTS``; returns its last line, decoded from JSON."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = python("-m", f"support.{module}", *arguments, code=None, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.returncode} in {lines[-1:]}: {done.stderr[-2000:]}"
    return json.loads(lines[-1])


@pytest.mark.parametrize("group", sorted(GROUPS.keys() - {"collectives", "cuda_collectives"}))
def test_bad_arguments_are_refused(group: str) -> None:
    assert last_line_of("bad_calls", group) == []


def test_bad_arguments_of_collectives_are_refused(device: torch.device) -> None:
    group = "cuda_collectives" if device.type == "cuda" else "collectives"
    assert last_line_of("bad_calls", group) == []


def test_random_tensors() -> None:
    counts = last_line_of("random_calls")
    # Each outcome must occur often, or the generator misses cases.
    assert all(counts[outcome] > 20 for outcome in ("done", "TypeError", "ValueError")), counts
