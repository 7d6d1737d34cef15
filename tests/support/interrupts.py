"""Passes that Ctrl-C ends at any moment, and what must be as before then.

``Injector`` raises at the n-th place where Python looks for signals. Run as a script, signals come for
some seconds: ``cd tests && python -m support.interrupts SECONDS [SEED]``.
"""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.batchnorm import DeferredBatchNorm
from pipekernels.device import restoring
from pipekernels.pipeline.engine import engine, lanes, stages
from pipekernels.pipeline.engine.pace import Pace
from pipekernels.pipeline.stage import checkpoint, random_state, skip
from support.skip_layers import Pop, Stash

WIDTH = 4
Around = Callable[[], AbstractContextManager[object]]
SIGNALS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
"""Operations that end with a look for signals, by how their names begin."""

CONTEXTS = ("contextlib.py", "restoring.py", "overrides.py", "grad_mode.py")


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of the operations in ``code`` before which a signal's exception may be raised, as if by the
    operation before."""
    # From Python 3.11 on a `with` or `try` ends without an operation: what follows is not covered.
    parse = getattr(dis, "_parse_exception_table", lambda code: [])
    table = [(e.start, e.end, e.target) for e in parse(code)]

    def handler(offset: int) -> int | None:
        return next((target for begin, end, target in table if begin <= offset < end), None)

    return frozenset(
        after.offset
        for operation, after in pairwise(dis.get_instructions(code))
        if operation.opname.startswith(SIGNALS)
        and not operation.opname.endswith("NO_INTERRUPT")
        and handler(operation.offset) == handler(after.offset)
    )


class Injector:
    """Raises KeyboardInterrupt in the body, on this thread, at the ``at``-th place where a signal could do
    so; ``places`` are those that there were, by what was to be done."""

    def __init__(self, at: int) -> None:
        self.places: dict[tuple[CodeType, int], list[int]] = {}
        self.where = ""
        self._at = at
        self._count = 0

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        code = frame.f_code
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            # Torch imports some modules late; half of one would stay. And what ends a destructor comes up
            # elsewhere.
            if "importlib" in code.co_filename or code.co_name in ("_call_at_end", "settle_all"):
                return None
            if (
                code.co_flags & 0x20
            ):  # A generator may go on inside a `try`, which this event skips.
                return self._trace
        elif event != "opcode" or frame.f_lasti not in _places(code):
            return self._trace
        self._count += 1
        self.places.setdefault((code, frame.f_lasti), []).append(self._count)
        if self._count == self._at:
            sys.settrace(None)
            self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
            raise KeyboardInterrupt
        return self._trace

    @contextmanager
    def active(self) -> Iterator[None]:
        before = sys.gettrace()
        try:
            sys.settrace(self._trace)
            yield
        finally:
            sys.settrace(before)


class Recorder(nn.Module):
    """Draws in Python and has a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.rand_like(x) * 0.125


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Stash(), nn.Dropout(0.25), DeferredBatchNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Recorder(), Pop(), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


class Case:
    """A pipe, a way to run it, and what must hold whenever a pass has ended.

    Args:
        way: of :data:`pipekernels.pipeline.engine.pace.Way`, "first" for a pipe's first pass, or "devices" for
            what is done where stages are on CUDA devices.
        checkpointed: whether stages are recomputed.
        pass_: "forward" without a graph, "backward" of a forward, "train_step", or "autocast" for one
            under autocast, whose backward is outside of it.
    """

    def __init__(self, way: str, checkpointed: bool, pass_: str) -> None:
        self.name = f"{way}, checkpointed={checkpointed}, {pass_}"
        self.pass_ = pass_
        with pytest.MonkeyPatch.context() as patch:
            if way == "devices":
                patch.setattr(stages, "has_streams", lambda device: True)
            self.pipe = Pipe(
                layers(), [3, 3, 3], devices=["cpu"] * 3, chunks=3,
                checkpoint="always" if checkpointed else "never",
                execution="auto" if way in ("first", "devices") else way,
            )  # fmt: skip
        self.x = torch.arange(24.0).reshape(6, WIDTH) / 24
        modules = list(self.pipe.modules())
        self.tensors = [
            (owner, name, tensor)
            for module in modules
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
        ]
        self.saved = {k: v.clone() for k, v in self.pipe.state_dict().items()}
        self.modes = [(module, module.training) for module in modules]
        self.threads = torch.get_num_threads()
        torch.manual_seed(2)
        self.fresh = nn.Linear(3, 3).weight.detach().clone()
        self.states = self._states()
        for _ in range(2):
            self.expected = self.run()

    def _states(self) -> list[torch.Tensor]:
        """Of the generator, before and after the number that each forward draws."""
        torch.manual_seed(3)
        before = torch.get_rng_state()
        torch.empty((), dtype=torch.int64).random_()
        return [before, torch.get_rng_state()]

    def step(self, around: Around = nullcontext) -> torch.Tensor:
        """The pass that is broken off, ``around`` its calls: what the caller enters is the caller's."""
        if self.pass_ == "train_step":
            with around():
                return self.pipe.train_step(self.x, None, torch.sum, schedule="1f1b")
        if self.pass_ == "forward":
            with torch.no_grad(), around():
                return self.pipe(self.x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.pass_ == "autocast"), around():
            output = self.pipe(self.x)
        loss = output.float().square().sum()
        with around():
            loss.backward()
        return output.detach()

    def prepare(self) -> None:
        """The same state before every pass."""
        with torch.no_grad():
            for key, value in self.pipe.state_dict().items():
                value.copy_(self.saved[key])
        self.pipe.zero_grad()
        self.pipe._engine._chooser._pace = Pace()  # As before a first pass.
        torch.set_rng_state(self.states[0])

    def run(self) -> list[torch.Tensor | None]:
        self.prepare()
        output = self.step()
        grads = [None if p.grad is None else p.grad.clone() for p in self.pipe.parameters()]
        buffers = [buffer.clone() for buffer in self.pipe.buffers()]
        return [output.clone(), *grads, *buffers]

    def broken_off(self, around: Around) -> bool:
        """Run the pass, which ``around`` may break off anywhere, and check what is left. Returns whether it
        was broken off."""
        self.prepare()
        kept = None
        try:
            self.step(around)
        except KeyboardInterrupt as error:
            kept = error  # As interactive interpreters do: no generator ends yet.
        self.check()
        interrupted = kept is not None
        del kept
        gc.collect(0)
        self.check()
        return interrupted

    def check(self) -> None:
        """That what a pass changes is as before."""
        assert torch._C._len_torch_function_stack() == 0, "a function mode stayed"
        assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode stayed"
        assert torch.utils._device.CURRENT_DEVICE is None, "the default device is another"
        assert torch.is_grad_enabled(), "grad mode is another"
        assert not torch.is_inference_mode_enabled(), "inference mode is another"
        assert not torch.is_autocast_enabled("cpu"), "autocast stayed"
        assert torch.is_autocast_cache_enabled(), "autocast does not cache"
        assert torch.autocast_increment_nesting() == 1, "autocasts are nested"
        torch.autocast_decrement_nesting()
        assert torch.get_num_threads() == self.threads, "the number of threads is another"
        assert any(torch.equal(torch.get_rng_state(), s) for s in self.states), "random numbers"
        assert not checkpoint.is_checkpointing() and not checkpoint.is_recomputing()
        assert skip._current.skips == {}, "skips stayed"
        assert engine._running.get() == (), "the pipe is taken for running"
        assert restoring._changes.made == [], "changes are not taken back"
        for lock in (
            self.pipe._engine._lock,
            self.pipe._engine._turns,
            random_state._generator_lock,
        ):
            assert not lock._is_owned(), "a lock is held"  # type: ignore[attr-defined]
        assert not lanes._workers_lock._is_owned() and all(w.loan.over for w in lanes._workers)
        for owner, name, tensor in self.tensors:
            assert owner[name] is tensor, f"{name} is another tensor"
        assert all(module.training == mode for module, mode in self.modes)

    def check_again(self) -> None:
        """That fresh layers, and the pipe, give the bits that they gave before."""
        torch.manual_seed(2)
        assert torch.equal(nn.Linear(3, 3).weight, self.fresh)
        for found, wanted in zip(self.run(), self.expected, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)


def cases() -> list[tuple[str, bool, str]]:
    """What tells cases apart."""
    found = [
        (way, checkpointed, pass_)
        for way in ("first", "inline", "threads")
        for checkpointed in (False, True)
        for pass_ in ("backward", "train_step")
    ]
    split = [("split", False, "backward"), ("threads", False, "forward")]
    return [*found, *split, ("inline", True, "autocast"), ("threads", True, "autocast")]


def cases_of_devices() -> list[tuple[str, bool, str]]:
    """Those with destructors, in which signals come up later."""
    return [("devices", True, "backward"), ("devices", False, "train_step")]


def sweep(case: Case, operations: int, seed: int) -> None:
    """Break a case off at so many operations, chosen at random, most of them where contexts begin and end.
    AssertionError says where, if something is wrong afterwards."""
    rng = random.Random(seed)
    found: tuple[list[list[int]], list[list[int]]] = [], []
    for (code, _), places in places_of(case).items():
        of_context = (
            code.co_name in ("__enter__", "__exit__") or Path(code.co_filename).name in CONTEXTS
        )
        found[of_context].append(places)
    rare = rng.sample(found[1], min(len(found[1]), operations * 3 // 4))
    for places in rare + rng.sample(found[0], operations - len(rare)):
        break_off(case, rng.choice(places))


def places_of(case: Case) -> dict[tuple[CodeType, int], list[int]]:
    """All places of a case, by the operation."""
    injector = Injector(0)
    case.prepare()
    case.step(injector.active)
    return injector.places


def break_off(case: Case, place: int) -> None:
    """Break a case off there. AssertionError if something is wrong afterwards."""
    injector = Injector(place)
    try:
        case.broken_off(injector.active)
        case.check_again()
    except Exception as error:
        raise AssertionError(f"{case.name}, {injector.where}: {error}") from error


def signals(seconds: float, seed: int) -> tuple[int, int]:
    """Break all cases off by signals for so long, in turn; returns how many passes there were, and how many
    were broken off."""
    armed: list[bool] = []

    def interrupt(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    @contextmanager
    def reachable() -> Iterator[None]:
        try:
            armed.append(True)
            yield
        finally:
            armed.clear()

    signal.signal(signal.SIGALRM, interrupt)
    rng, found = random.Random(seed), [Case(*arguments) for arguments in cases()]
    passes = interrupted = 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for case in found:
            begin = time.perf_counter()
            case.run()
            last = time.perf_counter() - begin
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, last))
                interrupted += case.broken_off(reachable)
                passes += 1
            case.check_again()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return passes, interrupted


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*signals(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
