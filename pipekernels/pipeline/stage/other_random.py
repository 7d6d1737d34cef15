"""Replays random numbers that layers draw elsewhere than from torch's default generators.

These are Python's ``random``, NumPy's global generator, and generators that layers own or pass to
torch's functions. Nothing foretells such a draw, and the first two have no hook to see it by. So a
task compares the states of the generators before and after its forward; those that it has moved are
put back for its recomputation.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pipekernels.device.restoring import restoring


class Source(NamedTuple):
    """A generator: how to read and write its state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    whole: Source | None = None
    """The generator with all of its state, if ``get`` reads a part that suffices at first."""


class _Draw(NamedTuple):
    """The state of a generator before and after a task that has moved it."""

    source: Source
    before: Any
    after: Any


States = dict[object, tuple[Source, Any]]
"""Generators, by a name or by id, each with its state when a task first could have used it."""


def _find_maker(kind: type) -> Callable[[Any], Source] | None:
    """Makes the source of a generator of this class; None for others, and where there is no state
    that could be restored. Cached, as it is asked for every attribute of every layer."""
    if issubclass(kind, torch.Generator):
        return lambda g: Source(g.get_state, g.set_state)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return lambda g: Source(g.getstate, g.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.random.RandomState):
        return lambda g: Source(partial(g.get_state, legacy=False), g.set_state)
    if numpy is not None and issubclass(kind, numpy.random.Generator):
        return lambda g: Source(
            partial(getattr, g.bit_generator, "state"), partial(setattr, g.bit_generator, "state")
        )
    return None


_maker: Callable[[Any], Callable[[Any], Source] | None] = cache(_find_maker)


def source_of(generator: object) -> Source | None:
    """None if ``generator`` is none, or has no state that could be restored."""
    make = _maker(type(generator))
    return None if make is None else make(generator)


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are equal. NumPy's are nested dicts with numbers and arrays in them."""
    if isinstance(one, dict):
        return all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    same = one == other
    return same if isinstance(same, bool) else bool(same.all())


def _process_wide() -> dict[object, Source]:
    sources: dict[object, Source] = {"random": Source(random.getstate, random.setstate)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        sources["numpy"] = _global_numpy(numpy)
    return sources


def _global_numpy(numpy: Any) -> Source:
    """NumPy's global generator. Its state takes as long to read as a small layer runs, so what is
    read is the memory of its Mersenne Twister. The rest, half of a pair of normal numbers, is known
    until the first draw: there is none."""
    whole = Source(partial(numpy.random.get_state, legacy=False), numpy.random.set_state)
    begin = whole.get()
    has_memory = hasattr(numpy.random, "get_bit_generator")  # From NumPy 1.24 on.
    if begin["bit_generator"] != "MT19937" or begin["has_gauss"] or not has_memory:
        return whole
    words = 624  # Followed by the position, an int.
    address = numpy.random.get_bit_generator().ctypes.state_address

    def put(memory: bytes) -> None:
        key = numpy.frombuffer(memory, numpy.uint32, words).copy()
        position = int.from_bytes(memory[4 * words :], sys.byteorder)
        whole.set({**begin, "state": {"key": key, "pos": position}})

    return Source(lambda: ctypes.string_at(address, 4 * words + 4), put, whole=whole)


class OtherRandom:
    """What the tasks of one mini-batch draw elsewhere. ``given`` gets the generators that layers
    pass to torch's functions, by id."""

    def __init__(self, stages: Sequence[nn.Module], given: dict[object, Source]) -> None:
        self._stages = stages
        self._given = given
        self._process_wide: dict[object, Source] = {}
        self._owned: dict[int, dict[object, Source]] = {}  # By stage.
        self._draws: dict[tuple[int, int], list[_Draw]] = {}  # By (stage, micro-batch).

    @contextmanager
    def recorded(self, stage: int, micro_batch: int, moved: Callable[[], None]) -> Iterator[States]:
        """Record what the body, a forward, draws; call ``moved`` if it has drawn. Yields the states
        of the known generators; the body adds those that are given to functions."""
        if stage not in self._owned:
            # The losses are one more stage, without layers.
            layers = [layer for s in self._stages[stage : stage + 1] for layer in s.modules()]
            values = [v for layer in layers for v in vars(layer).values() if _maker(type(v))]
            self._owned[stage] = {id(v): source for v in values if (source := source_of(v))}
        wide = self._process_wide = self._process_wide or _process_wide()
        known = wide | self._owned[stage] | self._given
        states: States = {key: (source, source.get()) for key, source in known.items()}
        yield states
        draws = []
        for key, (source, before) in states.items():
            after = source.get()
            if not _equal(before, after):
                draws.append(_Draw(source, before, after))
                if source.whole is not None:
                    self._process_wide = {**self._process_wide, key: source.whole}
            if key not in known:
                self._given[key] = source
        if draws:
            self._draws[stage, micro_batch] = draws
            moved()

    def drew(self, stage: int, micro_batch: int) -> bool:
        """Whether a forward has drawn."""
        return (stage, micro_batch) in self._draws

    @contextmanager
    def replayed(self, stage: int, micro_batch: int, *, alone: bool) -> Iterator[None]:
        """Have the body, a recomputation, draw what its forward has drawn. RuntimeError if
        something else has drawn while the forward ran, unless it ran ``alone``."""
        draws = self._draws[stage, micro_batch]
        sources = [draw.source.whole or draw.source for draw in draws]
        now = [(source.set, source.get()) for source in sources]

        def put_back() -> None:
            for put, state in now:
                put(state)

        with restoring(put_back):
            for draw in draws:
                draw.source.set(draw.before)
            yield
            for source, before, after in () if alone else draws:  # As read in the forward.
                end = source.get()
                if not _equal(end, after) and not _equal(end, before):
                    raise RuntimeError(
                        "several stages have begun to draw random numbers from Python's random, "
                        "NumPy or another generator, at the same time; run this mini-batch "
                        "again, and the pipe will keep to one thread"
                    )
