"""Random numbers that depend on (seed, stage, microbatch) and never on timing.

torch has one CPU generator per process, so stages that run at the same time would draw from it in
an order that changes from run to run, and a recomputation would see other dropout masks than its
forward. Here every task has its own seed, derived from one number that each forward of the
pipe draws from the default CPU generator:

* on one thread the generators are simply seeded before each task;
* on a worker they are seeded around each random function, under a lock (:class:`WorkerRandom`).

Both give the same numbers. As under torch.utils.checkpoint, only torch's default generators are
handled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Guards the process-wide generator against workers of all pipes.
_generator_lock: Any = threading.Lock()
# A worker, a thread only of the parent, may have held it.
os.register_at_fork(after_in_child=_generator_lock._at_fork_reinit)


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


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws random numbers."""
    return func in _RANDOM and all(
        args[position] if len(args) > position else kwargs.get(name, default)
        for position, name, default in _RANDOM[func]
    )


@dataclass
class Observed:
    """What mini-batches have found out about what layers do, on any thread. Random numbers would
    depend on timing on several threads if layers draw some that are hidden, or draw and set."""

    draws: bool = False  # They draw random numbers that workers can seed separately.
    # They draw some that workers cannot: from a generator of their own, or where no function mode
    # sees it (in C++ or compiled code, in a backward).
    hidden: bool = False
    # They set the state of the process-wide generator, as layers do that seed or recompute
    # themselves. That changes the random numbers of other threads.
    sets: bool = False
    tensor_hooks: bool = False  # They put hooks on tensors.


class HookWatch(TorchFunctionMode):
    """Notes whether the calling thread puts hooks on tensors."""

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self.observed = observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.observed.tensor_hooks |= func in _TENSOR_HOOKS
        return func(*args, **(kwargs or {}))


class WorkerRandom(HookWatch):
    """Seeds the random functions of one task, on the calling thread, by ``seed``; without one, for
    a backward, it refuses them."""

    def __init__(self, observed: Observed, seed: int | None = None) -> None:
        super().__init__(observed)
        self._seed = seed
        self._state: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        self.observed.draws = True
        if self._seed is None:
            # A layer that recomputes its forward sets the state of the process-wide generator,
            # which other workers also use. The next mini-batch will run on one thread.
            self.observed.hidden = True
            raise RuntimeError(
                "a layer of the pipe has begun to draw random numbers in its backward, as layers "
                "do that checkpoint themselves; run this mini-batch again, and the pipe will keep "
                "to one thread"
            )
        # Each task has a sequence of its own. It is in the process-wide generator, which torch's
        # functions draw from, only while the lock is held.
        generator = torch.default_generator
        with _generator_lock:
            if self._state is None:
                generator.manual_seed(self._seed)
            else:
                generator.set_state(self._state)
            result = func(*args, **kwargs)
            self._state = generator.get_state()
        return result


class Audit(HookWatch):
    """Notes what :class:`WorkerRandom` cannot seed in one task, on one thread, whose generator has
    been seeded for it; in a backward, all random numbers."""

    def __init__(self, observed: Observed, *, backward: bool = False) -> None:
        super().__init__(observed)
        self._backward = backward
        self._state = torch.default_generator.get_state()

    def __enter__(self) -> Any:
        # Functions of torch.random look this name up, and no function mode sees them.
        _audits.append(self)
        torch.random.default_generator = _WatchedGenerator()  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _audits.remove(self)
        if not _audits:
            torch.random.default_generator = torch.default_generator
        self.check()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)
        self.observed.draws = True
        self.observed.hidden |= self._backward or kwargs.get("generator") is not None
        # The state is what the last function left, unless something drew in between.
        self.check()
        result = func(*args, **kwargs)
        self._state = torch.default_generator.get_state()
        return result

    def check(self) -> None:
        """Note numbers drawn where this mode has not seen it."""
        now = torch.default_generator.get_state()
        self.observed.hidden |= not torch.equal(self._state, now)

    def note_set(self) -> None:
        """Note that the generator's state has been set."""
        self.observed.sets = True
        self._state = torch.default_generator.get_state()


_audits: list[Audit] = []  # Those that run, of any thread.


class _WatchedGenerator:
    """Stands for the default generator in the functions of ``torch.random`` while audits run."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.default_generator, name)
        return partial(_set, method) if name in ("set_state", "manual_seed", "seed") else method


def _set(setter: Callable[..., Any], *args: Any) -> Any:
    for audit in tuple(_audits):
        audit.check()  # Of what `setter` undoes.
    result = setter(*args)
    for audit in tuple(_audits):
        audit.note_set()
    return result
