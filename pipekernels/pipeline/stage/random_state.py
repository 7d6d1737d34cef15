"""Random numbers that depend on (seed, stage, micro-batch) and never on timing.

torch has one CPU generator per process, so stages that run at the same time would draw from it in
an order that changes from run to run, and a recomputation would see other dropout masks than its
forward. Here every task has its own seed, derived from one number that each forward of the
pipe draws from the default CPU generator:

* on one thread the generators are simply seeded before each task;
* on a lane they are seeded around each random function, under a lock (:class:`LaneRandom`).

Both give the same numbers. As torch.utils.checkpoint, this leaves all other generators alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pipekernels._torch_private import no_function_modes

# Guards the process-wide generator against lanes of all pipes. Reentrant: LaneRandom of a pipe and
# of one nested in it both handle a random function of the inner pipe.
_generator_lock: Any = threading.RLock()
# A lane, a thread only of the parent, may have held it.
os.register_at_fork(after_in_child=_generator_lock._at_fork_reinit)


def task_seed(base: int, stage: int, micro_batch: int) -> int:
    """Seed of one (stage, micro-batch) of the mini-batch that drew ``base``. The odd strides make
    seeds distinct."""
    return (base + stage * 0x9E3779B1 + micro_batch * 0x85EBCA77) & 0x7FFFFFFFFFFFFFFF


def _generators(devices: list[torch.device]) -> list[torch.Generator]:
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    if cuda:
        torch.cuda.init()  # torch creates the CUDA generators here.
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in cuda)]


@contextmanager
def preserved(devices: list[torch.device]) -> Iterator[None]:
    """Restore the states of the generators of ``devices`` after the body."""
    saved = [(generator, generator.get_state()) for generator in _generators(devices)]
    try:
        yield
    finally:
        for generator, state in saved:
            generator.set_state(state)


_NAMES = {
    F: "alpha_dropout feature_alpha_dropout rrelu rrelu_ gumbel_softmax "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices",
    torch: "rand rand_like randn randn_like randint randint_like randperm bernoulli binomial "
    "multinomial normal poisson rrelu rrelu_ dropout dropout_ native_dropout alpha_dropout "
    "alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_",
    torch.Tensor: "bernoulli bernoulli_ multinomial normal_ uniform_ random_ exponential_ "
    "geometric_ cauchy_ log_normal_",
}
_DROPOUTS = F.dropout, F.dropout1d, F.dropout2d, F.dropout3d
# torch's random functions that a TorchFunctionMode sees. They draw if all these arguments, each a
# (position, name, default), are true.
_RANDOM: dict[Any, list[tuple[int, str, Any]]] = {
    **{getattr(owner, name): [] for owner, names in _NAMES.items() for name in names.split()},
    **{dropout: [(1, "p", 0.5), (2, "training", True)] for dropout in _DROPOUTS},
    F.scaled_dot_product_attention: [(4, "dropout_p", 0.0)],
    F.multi_head_attention_forward: [(10, "dropout_p", 0.0)],
}
_TENSOR_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}
_SEEDED: AbstractContextManager[None] = nullcontext()


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers."""
    return func in _RANDOM and all(
        args[position] if len(args) > position else kwargs.get(name, default)
        for position, name, default in _RANDOM[func]
    )


class HookWatch(TorchFunctionMode):
    """Notes in ``saw_tensor_hooks`` whether the calling thread puts hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.saw_tensor_hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.saw_tensor_hooks |= func in _TENSOR_HOOKS
        return func(*args, **(kwargs or {}))


class DrawWatch(TorchFunctionMode):
    """Calls ``found`` for every random function that draws on the calling thread."""

    def __init__(self, found: Callable[[], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self._found()
        return func(*args, **kwargs)


class LaneRandom(HookWatch):
    """Seeds the random functions of one task, on the calling thread, by ``seed``. Notes in ``drew``
    whether there were any."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drew = False
        self._seed = seed
        self._state: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        self.drew = True
        generator = torch.default_generator
        with _generator_lock:
            self._begin(kwargs)
            result = func(*args, **kwargs)
            self._state = generator.get_state()
        return result

    def _begin(self, kwargs: Mapping[str, Any]) -> None:
        """Prepare the generator for a random function."""
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)
        else:
            torch.default_generator.set_state(self._state)


class AuditedRandom(LaneRandom):
    """Seeds the default generator once, on one thread, and notes what :class:`LaneRandom` would do
    otherwise: in ``hidden`` whether numbers also came from a generator that lanes cannot seed, a
    layer's own, or the default one where the mode does not see it (in C++ or compiled code); in
    ``sets`` whether layers set the state of the default one, as by ``torch.random.fork_rng``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hidden = self.sets = False
        self._state = torch.default_generator.manual_seed(seed).get_state()

    def _begin(self, kwargs: Mapping[str, Any]) -> None:
        self.hidden |= kwargs.get("generator") is not None
        self.check()

    def note_set(self, setter: Callable[..., Any], *args: Any) -> Any:
        """Call ``setter``, for :func:`setters_noted`, after a check of what it undoes."""
        self.check()
        self.sets = True
        result = setter(*args)
        self._state = torch.default_generator.get_state()
        return result

    def check(self) -> None:
        """Note draws that the mode did not see; also after the task."""
        assert self._state is not None
        self.hidden |= not torch.equal(self._state, torch.default_generator.get_state())


class _Watched(threading.local):
    """Whom a thread tells of each setter that it calls; it calls that."""

    note: Callable[..., Any] | None = None


class _NotingGenerator:
    """Stands for the default generator in the functions of ``torch.random``."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.default_generator, name)
        if _watched.note is None or name not in ("set_state", "manual_seed", "seed"):
            return method
        return partial(_watched.note, method)


_watched = _Watched()
_watching = 0  # Threads.


@contextmanager
def setters_noted(note: Callable[..., Any]) -> Iterator[None]:
    """Have functions of ``torch.random`` that set the default generator's state call ``note(setter,
    *args)`` instead of the setter, on this thread in the body."""
    global _watching
    before = _watched.note
    with _generator_lock:
        _watching += 1
        torch.random.default_generator = _NotingGenerator()  # type: ignore[assignment]
    _watched.note = note
    try:
        yield
    finally:
        _watched.note = before
        with _generator_lock:
            _watching -= 1
            if not _watching:
                torch.random.default_generator = torch.default_generator


class MiniBatchSeeds:
    """The random numbers of one mini-batch, with stages on ``devices``. The constructor draws one
    number from the default CPU generator."""

    def __init__(self, devices: list[torch.device]) -> None:
        # Without function modes, so that an outer pipe takes this draw for hidden randomness and
        # does not run this pipe on a lane: inline() seeds the generator without the lock.
        with no_function_modes():
            self._base = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._seeders = [generator.manual_seed for generator in _generators(devices)]

    def inline(self, micro_batch: int, stage: int) -> AbstractContextManager[Any]:
        """Seed the generators for a task; only one thread may run stages."""
        seed = task_seed(self._base, stage, micro_batch)
        for manual_seed in self._seeders:
            manual_seed(seed)
        return _SEEDED

    def on_lane(self, micro_batch: int, stage: int) -> LaneRandom:
        """For a task that runs at the same time as others."""
        return LaneRandom(task_seed(self._base, stage, micro_batch))

    def audited(self, micro_batch: int, stage: int) -> AuditedRandom:
        """As :meth:`inline`, and checks whether :meth:`on_lane` would give the same numbers."""
        return AuditedRandom(task_seed(self._base, stage, micro_batch))
