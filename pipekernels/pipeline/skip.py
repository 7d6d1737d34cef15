"""Skip connections: tensors that a layer stashes and a later layer, or stage, pops.

In a pipe a skip goes directly from the stage that stashes it to the one that pops it, and its
gradient goes directly back (Kim et al., torchgpipe, 2020). The layers also work in an unwrapped
``nn.Sequential``. :doc:`/guides/pipe` has an example.
"""

from __future__ import annotations

import functools
import inspect
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from pipekernels._arguments import check_kind


@dataclass(frozen=True)
class Namespace:
    """Separates skips of the same name. ``Namespace()`` is always a new one; a copy is equal to its
    original. See ``isolate``."""

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


Key = tuple[Namespace | None, str]
"""A skip: its namespace, None for the default one, and its name."""

_Layer = TypeVar("_Layer", bound=type[nn.Module])


@dataclass(frozen=True)
class stash:
    """``yield stash(name, tensor)`` in a forward keeps ``tensor``, or None, for a later layer."""

    name: str
    tensor: torch.Tensor | None

    def __post_init__(self) -> None:
        types = (torch.Tensor, type(None))
        check_kind(f"the skip {self.name!r}", self.tensor, types, "a tensor or None")


@dataclass(frozen=True)
class pop:
    """``tensor = yield pop(name)`` in a forward takes what an earlier layer stashed."""

    name: str


class _Current(threading.local):
    def __init__(self) -> None:
        self.skips: dict[Key, torch.Tensor | None] = {}  # Stashed and not popped yet.


_current = _Current()


@contextmanager
def carried(skips: Mapping[Key, torch.Tensor | None]) -> Iterator[dict[Key, torch.Tensor | None]]:
    """Let layers on this thread pop ``skips``; yields the dict that they pop from and stash to."""
    before = _current.skips
    try:
        _current.skips = dict(skips)
        yield _current.skips
    finally:
        _current.skips = before


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[_Layer], _Layer]:
    """Declare the skips of a layer class whose forward is a generator, or of one without skips.

    The class gets ``isolate(namespace, *, only=None)``, which puts the layer's skips (or those
    named in ``only``) into ``namespace`` and returns the layer; ``stashable()`` and ``poppable()``
    return its skips as (namespace, name).

    Args:
        stash: names that the forward stashes, each exactly once.
        pop: names that the forward pops, each exactly once.

    Raises:
        TypeError: the decorated class is not an ``nn.Module``.
    """
    stashes, pops = frozenset(stash), frozenset(pop)

    def decorate(layer_class: _Layer) -> _Layer:
        if not (inspect.isclass(layer_class) and issubclass(layer_class, nn.Module)):
            raise TypeError(f"skippable decorates a subclass of nn.Module, not {layer_class!r}")
        plain = layer_class.forward

        @functools.wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _result(self, plain(self, *args, **kwargs))

        layer_class.forward = forward
        added: Any = layer_class
        # Shared by all layers of the class: isolate() gives a layer its own dict.
        added._stashes, added._pops, added._skip_namespaces = stashes, pops, {}
        added.isolate = _isolate
        added.stashable = lambda self: _keys(self, self._stashes)
        added.poppable = lambda self: _keys(self, self._pops)
        return layer_class

    return decorate


def _isolate(self: Any, ns: Namespace, *, only: Iterable[str] | None = None) -> Any:
    """Put the layer's skips, or those named in ``only``, into ``ns``; returns the layer."""
    declared = self._stashes | self._pops
    names = set(only) if only is not None else declared
    if not names <= declared:
        unknown = ", ".join(map(repr, sorted(names - declared)))
        known = ", ".join(map(repr, sorted(declared))) or "none"
        raise ValueError(f"{type(self).__name__} has no skip {unknown}; its skips are {known}")
    self._skip_namespaces = {**self._skip_namespaces, **dict.fromkeys(names, ns)}
    return self


def _keys(layer: Any, names: Iterable[str]) -> list[Key]:
    return [(layer._skip_namespaces.get(name), name) for name in sorted(names)]


def _result(layer: Any, result: Any) -> Any:
    """What a forward returns that returned ``result``: a generator is run to its end, and the
    commands that it yields are executed."""
    skips, name = _current.skips, type(layer).__name__
    declared = {("stash", skip) for skip in layer._stashes}
    declared |= {("pop", skip) for skip in layer._pops}
    missing = set(declared)  # Commands that are still to come.
    stashed = dict[Key, torch.Tensor | None]()
    answer: torch.Tensor | None = None
    while inspect.isgenerator(result):
        try:
            command: Any = result.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            result = end.value
            break
        if not isinstance(command, (stash, pop)):
            raise TypeError(
                f"{name} yielded {type(command).__name__}; a forward yields stash(name, tensor) or "
                "pop(name)"
            )
        # A command must be declared, and is used once: the routes between stages rely on that.
        does, skip = type(command).__name__, command.name
        if (does, skip) not in missing:
            reason = "a second time" if (does, skip) in declared else "without declaring it"
            raise RuntimeError(
                f"{name} does {does}({skip!r}) {reason}; every skip is declared with "
                f"@skippable({does}=[...]) and used once per forward"
            )
        missing.remove((does, skip))
        (key,) = _keys(layer, [skip])
        answer = None
        if isinstance(command, pop):
            if key not in skips:
                raise RuntimeError(f"{name} pops {skip!r}, which no layer before it has stashed")
            answer = skips.pop(key)
        else:
            stashed[key] = command.tensor
    if missing:
        does, skip = min(missing)
        raise RuntimeError(f"{name} declares {does}={[skip]} and did not {does} it in this forward")
    skips.update(stashed)  # Only now: a forward that raises must not stash anything.
    return result


class SkipRoutes:
    """The skips that are stashed in one of ``stages`` and popped in another. The layers must have
    passed :func:`verify_skippables`."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self.sent: list[list[Key]] = [[] for _ in stages]
        self.received: list[list[Key]] = [[] for _ in stages]
        self.receiver: dict[Key, int] = {}
        stashed_in: dict[Key, int] = {}
        for index, stage in enumerate(stages):
            for stashed, popped in skips_of(stage):
                for key in popped:
                    # Inside a stage, a skip goes from layer to layer and needs no route.
                    if stashed_in[key] != index:
                        self.sent[stashed_in[key]].append(key)
                        self.received[index].append(key)
                        self.receiver[key] = index
                stashed_in.update(dict.fromkeys(stashed, index))
        self.sender = {key: stashed_in[key] for key in self.receiver}


def skips_of(stage: Any) -> list[tuple[list[Key], list[Key]]]:
    """The skips that each skippable layer in ``stage`` stashes, and those that it pops."""
    layers = [layer for layer in stage.modules() if hasattr(layer, "_stashes")]
    return [(layer.stashable(), layer.poppable()) for layer in layers]


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip among the layers of ``module`` is stashed once and then popped once; a
    TypeError lists all violations."""
    check_kind("module", module, nn.Module, "an nn.Sequential")
    faults: list[str] = []
    stashed: dict[Key, str] = {}
    popped: set[Key] = set()

    def fault(name: str, does: str, key: Key, why: str) -> None:
        faults.append(f"layer {name!r} {does} {key[1]!r}, which {why}")

    # In the order in which layers run. A layer pops before it stashes, so it cannot pop its own.
    for name, layer in module.named_modules():
        for key in layer.poppable() if hasattr(layer, "_pops") else ():
            if key in popped:
                fault(name, "pops", key, "an earlier layer pops already")
            elif key not in stashed:
                fault(name, "pops", key, "no earlier layer stashes")
            popped.add(key)
        for key in layer.stashable() if hasattr(layer, "_stashes") else ():
            if key in stashed:
                fault(name, "stashes", key, f"layer {stashed[key]!r} stashes already")
            stashed.setdefault(key, name)
    for key, name in stashed.items():
        if key not in popped:
            fault(name, "stashes", key, "no later layer pops")
    if faults:
        raise TypeError(
            "skips do not match (layers that use one name for different skips need "
            "isolate(Namespace())): " + "; ".join(faults)
        )
