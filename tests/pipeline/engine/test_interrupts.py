"""Ctrl-C at any point of a pass: all state is restored."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import interrupts
from torch.overrides import _pop_mode_temporarily

from pipekernels.device.restoring import restore_despite_interrupt, restoring
from pipekernels.pipeline.engine.transport import at_end
from pipekernels.pipeline.stage.context import entered
from pipekernels.pipeline.stage.random_state import HookWatch

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = 10
SIGNALS = 500


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [*interrupts.cases(), *interrupts.cases_of_devices()], ids=str
)
def test_an_interrupt_after_any_operation(arguments: tuple[str, bool, str]) -> None:
    interrupts.sweep(interrupts.Case(*arguments), OPERATIONS, seed=0)


@pytest.mark.parametrize(
    ("arguments", "functions"),
    [
        (("devices", False, "train_step"), {"__enter__", "__exit__", "lock_again"}),
        (("inline", True, "backward"), {"keep_memory", "put_back", "accumulated", "_as_running"}),
    ],
)
def test_an_interrupt_of_a_clean_up(arguments: tuple[str, bool, str], functions: set[str]) -> None:
    """Parameters, buffers and locks are restored, and no gradient stays."""
    case = interrupts.Case(*arguments)
    found = {
        places[-1]: code.co_name
        for (code, _), places in interrupts.places_of(case).items()
        if code.co_name in functions and "pipekernels" in code.co_filename
    }
    assert set(found.values()) == functions
    for place in found:
        interrupts.interrupt_at(case, place)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("seed", range(10))
def test_signals_at_any_time(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.interrupts", str(SIGNALS), str(seed)],
        cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_contexts_in_a_function_that_restores() -> None:
    """At all places in context managers of each kind; the traceback keeps generators suspended."""
    open_: list[int] = []
    changed: list[int] = []

    @contextmanager
    def late() -> Iterator[None]:
        """Enters after it has begun to restore, as some context managers of torch do."""
        try:
            open_.append(1)
            yield
        finally:
            open_.pop()

    @restore_despite_interrupt
    def contexts() -> None:
        with late(), restoring(changed.clear):
            changed.append(1)
            with entered(HookWatch()), HookWatch(), torch.no_grad(), late():
                torch.ones(1)
            # Torch pops a mode temporarily while the mode calls a Python function.
            with entered(HookWatch()), _pop_mode_temporarily():
                pass

    at, kept = 0, None
    while at == 0 or kept is not None:
        at, kept = at + 1, None
        try:
            with interrupts.Injector(at).active():
                contexts()
        except KeyboardInterrupt as error:
            kept = error
        assert not open_ and not changed and torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 0
        if kept is not None:
            kept = KeyboardInterrupt()  # Drops the traceback.
        assert not open_ and torch._C._len_torch_function_stack() == 0
    assert at > 50


def test_an_interrupted_restore_is_retried() -> None:
    calls: list[int] = []

    def put_back() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    @restore_despite_interrupt
    def fails() -> None:
        with restoring(put_back):
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert len(calls) == 2


def test_an_interrupt_of_a_destructor_is_not_lost() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    destructor = at_end(work)
    assert not calls
    deadline = time.monotonic() + 60
    with pytest.raises(KeyboardInterrupt):
        del destructor
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(calls) == 2
