"""The quick tests start no process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=False),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: os.fork(),  # Not os.fork itself, which the fixture patches later.
    ],
    ids=["subprocess", "multiprocessing", "fork"],
)
def test_a_test_without_a_marker_may_not_start_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="starts a process; give it one of the markers"):
        start()
