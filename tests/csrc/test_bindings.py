"""The extension's functions refuse bad arguments and do not crash."""

import json
import os
from pathlib import Path

import pytest
import torch
from support.bad_calls import GROUPS
from support.programs import python

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]


def wrong_calls(group: str) -> list[str]:
    """The calls of a group that do not raise what they must."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = python("-m", "support.bad_calls", group, code=None, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.returncode} in {lines[-1:]}: {done.stderr[-2000:]}"
    return json.loads(lines[-1])


@pytest.mark.parametrize("group", sorted(GROUPS.keys() - {"collectives", "cuda_collectives"}))
def test_bad_arguments_are_refused(group: str) -> None:
    assert wrong_calls(group) == []


def test_bad_arguments_of_collectives_are_refused(device: torch.device) -> None:
    assert wrong_calls("cuda_collectives" if device.type == "cuda" else "collectives") == []
