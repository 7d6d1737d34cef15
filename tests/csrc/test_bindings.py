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


def wrong_calls(*groups: str) -> list[str]:
    """The calls of the groups that do not raise what they must."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = python("-m", "support.bad_calls", *groups, code=None, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.returncode} in {lines[-1:]}: {done.stderr[-2000:]}"
    return json.loads(lines[-1])


def test_bad_arguments_are_refused(device: torch.device) -> None:
    cuda = {"cuda_collectives"}
    assert wrong_calls(*(cuda if device.type == "cuda" else GROUPS.keys() - cuda)) == []
