"""Whatever a pass is doing when Ctrl-C ends it, nothing of it stays behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support import interrupts

from pipekernels.device.restoring import at_end

OPERATIONS = 10
SECONDS = 3


@pytest.mark.parametrize("arguments", interrupts.cases(), ids=str)
def test_an_interrupt_after_any_operation(
    arguments: tuple[str, bool, str], one_thread: None
) -> None:
    interrupts.sweep(interrupts.Case(*arguments), OPERATIONS, seed=0)


def test_signals_at_any_time() -> None:
    done = subprocess.run(
        [sys.executable, interrupts.__file__, str(SECONDS)],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0


def test_an_interrupt_of_a_destructor_is_not_lost() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    at_its_end = at_end(work)
    assert not calls
    deadline = time.monotonic() + 60
    with pytest.raises(KeyboardInterrupt):
        del at_its_end
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(calls) == 2
