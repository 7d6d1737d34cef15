"""Runs passes of a pipe that Ctrl-C interrupts, and checks that all state is restored afterwards.

``Injector`` raises KeyboardInterrupt at the n-th place where Python checks for signals. As a
script, this module interrupts passes by real signals at random times: ``cd tests && python -m
support.interrupts COUNT [SEED]``.
"""

import dis
import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from inspect import CO_GENERATOR
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import Pipe
from pipekernels.batchnorm import DeferredBatchNorm
from pipekernels.device.restoring import LOCKS
from pipekernels.pipeline.engine import engine, lanes, stages
from pipekernels.pipeline.stage import checkpoint, skip
from support.skip_layers import Pop, Stash

WIDTH = 4
Around = Callable[[], AbstractContextManager[object]]
SIGNALS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
"""Prefixes of the bytecode operations after which Python checks for signals."""

CONTEXT_FILES = ("contextlib.py", "restoring.py", "autocast.py", "overrides.py", "grad_mode.py")


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of operations in ``code`` before which a signal handler may raise."""
    # A signal's exception is raised at an operation, the injected one at the next. From Python 3.11
    # on no operation ends a `with` or `try`: skip places where these two have different handlers.
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
    """Raises KeyboardInterrupt at the ``at``-th place where a signal handler of this thread could.

    ``places`` has the numbers of all places that were reached, by code and offset.
    """

    def __init__(self, at: int) -> None:
        self.places: dict[tuple[CodeType, int], list[int]] = {}
        self.where = ""
        self._at = at
        self._count = 0

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        code = frame.f_code
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            # Not in imports, which torch does late: half a module would stay in sys.modules. Nor in
            # destructors, where exceptions are not raised.
            if "importlib" in code.co_filename or code.co_name in ("_call_at_end", "settle_all"):
                return None
            if code.co_flags & CO_GENERATOR:
                return self._trace  # It may resume in a `try`, which a "call" event would bypass.
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


class CountingNoise(nn.Module):
    """Adds random numbers, and counts its calls in a buffer."""

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
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), CountingNoise(), Pop(), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


class Case:
    """A pipe, a pass through it, and checks of everything that the pass must restore.

    Args:
        mode: the pipe's ``execution``, "first" for a pipe's first pass with ``execution="auto"``,
            or "devices" for what a pipe does if its stages are on CUDA devices.
        checkpointed: whether stages are recomputed.
        pass_: "forward" without a graph, "backward" for forward and backward, "train_step", or
            "autocast" for a forward under autocast and a backward outside of it.
    """

    def __init__(self, mode: str, checkpointed: bool, pass_: str) -> None:
        self.name = f"{mode}, checkpointed={checkpointed}, {pass_}"
        self.pass_ = pass_
        with pytest.MonkeyPatch.context() as patch:
            if mode == "devices":
                patch.setattr(stages, "has_streams", lambda device: True)
            self.pipe = Pipe(
                layers(), [3, 3, 3], devices=["cpu"] * 3, chunks=3,
                checkpoint="always" if checkpointed else "never",
                execution="auto" if mode in ("first", "devices") else mode,
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
        torch.manual_seed(3)
        self.states = [torch.get_rng_state()]
        torch.empty((), dtype=torch.int64).random_()  # Each forward of the pipe draws one number.
        self.states.append(torch.get_rng_state())
        for _ in range(2):
            self.expected = self.run()

    def step(self, around: Around = nullcontext) -> torch.Tensor:
        """Run the pass; each call of the pipe is made in ``around()``, which may interrupt it."""
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
        """Restore the state that the pass begins with."""
        with torch.no_grad():
            for key, value in self.pipe.state_dict().items():
                value.copy_(self.saved[key])
        self.pipe.zero_grad()
        self.pipe._engine._runners._auto.clear()  # No execution has been measured.
        torch.set_rng_state(self.states[0])

    def run(self) -> list[torch.Tensor | None]:
        self.prepare()
        output = self.step()
        grads = [None if p.grad is None else p.grad.clone() for p in self.pipe.parameters()]
        buffers = [buffer.clone() for buffer in self.pipe.buffers()]
        return [output.clone(), *grads, *buffers]

    def is_interrupted(self, around: Around) -> bool:
        """Run the pass, check what it must restore, and tell whether ``around`` interrupted it."""
        self.prepare()
        kept = None
        try:
            self.step(around)
        except KeyboardInterrupt as error:
            # Keep the traceback, as interactive interpreters do: suspended generators stay alive.
            kept = error
        self.check()
        interrupted = kept is not None
        del kept
        gc.collect(0)
        self.check()
        return interrupted

    def check(self) -> None:
        """Check that all state is as before the pass."""
        assert torch._C._len_torch_function_stack() == 0, "a function mode is still active"
        assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode is still active"
        assert torch.utils._device.CURRENT_DEVICE is None, "the default device has changed"
        assert torch.is_grad_enabled(), "grad mode has changed"
        assert not torch.is_inference_mode_enabled(), "inference mode has changed"
        assert not torch.is_autocast_enabled("cpu"), "autocast is still enabled"
        assert torch.is_autocast_cache_enabled(), "autocast's cache is disabled"
        assert torch.autocast_increment_nesting() == 1, "an autocast has not ended"
        torch.autocast_decrement_nesting()
        assert torch.get_num_threads() == self.threads, "the number of threads has changed"
        assert any(torch.equal(torch.get_rng_state(), s) for s in self.states), "random state"
        assert not checkpoint.is_checkpointing() and not checkpoint.is_recomputing()
        assert skip._current.skips == {}, "skips remain"
        assert engine._running.get() == (), "the pipe is still marked as running"
        engine_ = self.pipe._engine
        for lock in (engine_._lock, engine_._turns, *LOCKS):
            assert not lock._is_owned(), "a lock is still held"
        assert all(worker.loan.over for worker in lanes._workers), "lanes are still borrowed"
        for owner, name, tensor in self.tensors:
            assert owner[name] is tensor, f"{name} has been replaced"
        assert all(module.training == mode for module, mode in self.modes)

    def check_bits(self) -> None:
        """Check that a new layer, and another pass, have the same bits as before."""
        torch.manual_seed(2)
        assert torch.equal(nn.Linear(3, 3).weight, self.fresh)
        for found, wanted in zip(self.run(), self.expected, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)


def cases() -> list[tuple[str, bool, str]]:
    """Arguments of :class:`Case`."""
    found = [
        (mode, checkpointed, pass_)
        for mode in ("first", "inline", "threads")
        for checkpointed in (False, True)
        for pass_ in ("backward", "train_step")
    ]
    split = [("split", False, "backward"), ("threads", False, "forward")]
    return [*found, *split, ("inline", True, "autocast"), ("threads", True, "autocast")]


def cases_of_devices() -> list[tuple[str, bool, str]]:
    """As :func:`cases`, with destructors: a signal during one raises only after it."""
    return [("devices", True, "backward"), ("devices", False, "train_step")]


def sweep(case: Case, operations: int, seed: int) -> None:
    """Interrupt a case at that many random operations, up to 3/4 of them in context managers.

    Raises an AssertionError that names the operation if a check fails afterwards.
    """
    rng = random.Random(seed)
    in_contexts: list[list[int]] = []
    others: list[list[int]] = []
    for (code, _), places in places_of(case).items():
        is_context = (
            code.co_name in ("__enter__", "__exit__")
            or Path(code.co_filename).name in CONTEXT_FILES
        )
        (in_contexts if is_context else others).append(places)
    chosen = rng.sample(in_contexts, min(len(in_contexts), operations * 3 // 4))
    chosen += rng.sample(others, operations - len(chosen))
    for places in chosen:
        interrupt_at(case, rng.choice(places))


def places_of(case: Case) -> dict[tuple[CodeType, int], list[int]]:
    """The numbers of all places of a case, by code and offset."""
    injector = Injector(0)
    case.prepare()
    case.step(injector.active)
    return injector.places


def interrupt_at(case: Case, place: int) -> None:
    """Interrupt a case at a place. Raises AssertionError if a check fails afterwards."""
    injector = Injector(place)
    try:
        case.is_interrupted(injector.active)
        case.check_bits()
    except Exception as error:
        raise AssertionError(f"{case.name}, {injector.where}: {error}") from error


def send_signals(count: int, seed: int) -> None:
    """Interrupt all cases in turn by ``count`` signals at random times."""
    armed = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    @contextmanager
    def interruptible() -> Iterator[None]:
        nonlocal armed
        try:
            armed = True
            yield
        finally:
            armed = False

    signal.signal(signal.SIGALRM, interrupt)
    rng, found = random.Random(seed), [Case(*arguments) for arguments in cases()]
    interrupted = 0
    while interrupted < count:
        for case in found:
            begin = time.perf_counter()
            case.run()
            last = time.perf_counter() - begin
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, last))
                interrupted += case.is_interrupted(interruptible)
            case.check_bits()
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    send_signals(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
