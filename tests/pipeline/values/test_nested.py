"""Traversing and rebuilding nested containers."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from pipekernels.pipeline.values.nested import flattened, leaves, map_leaves

Point = namedtuple("Point", "x y")


@dataclass
class Plain:
    x: object
    y: object = None


@dataclass(frozen=True)
class Frozen:
    x: object
    rest: list = field(default_factory=list)
    total: int = field(init=False, default=7)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: object


class Output(OrderedDict):
    """A class registered with pytree, as Hugging Face's model outputs are."""


_pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda v, k: Output(zip(k, v, strict=True))
)


class Options(dict):
    """A dict that pytree does not know, and whose constructor takes other arguments."""

    def __init__(self, a: object, **rest: object) -> None:
        super().__init__(a=a, **rest)
        self.note = "kept"


def double(leaf: object) -> object:
    return leaf * 2 if isinstance(leaf, int) else leaf


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 6),
        ((1, 2), (2, 4)),
        ([1, "a", None], [2, "a", None]),
        ({"a": 1, "b": {"c": (2,)}}, {"a": 2, "b": {"c": (4,)}}),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (Point(1, [2]), Point(2, [4])),
        (Plain(1, {"k": 2}), Plain(2, {"k": 4})),
        (Plain(Plain([1])), Plain(Plain([2]))),
        (Slotted(1), Slotted(2)),
        (Output(a=1, b=(2,)), Output(a=2, b=(4,))),
        (Options(1, b=[2]), Options(2, b=[4])),
        ((), ()),
    ],
)
def test_containers_are_rebuilt(value: object, expected: object) -> None:
    result = map_leaves(double, value)
    assert result == expected
    assert type(result) is type(expected)


def test_dataclasses_are_rebuilt_without_their_constructor() -> None:
    value = Frozen([1], ["kept"])
    result = map_leaves(double, value)
    assert (result.x, result.rest, result.total) == ([2], ["kept"], 14)
    assert value.x == [1] and value.total == 7


@pytest.mark.parametrize(
    "value", [["a"], {"k": [()]}, Options("a"), Plain("a"), Point("x", ["y"]), [], "text"]
)
def test_unchanged_values_are_not_copied(value: object) -> None:
    assert map_leaves(double, value) is value


def test_dicts_of_any_class_keep_their_attributes() -> None:
    value = Options(1)
    value.note = "mine"
    result = map_leaves(double, value)
    assert type(result) is Options and result == {"a": 2} and result.note == "mine"
    assert value == {"a": 1}


def test_only_containers_around_a_change_are_copied() -> None:
    log: list[str] = []
    result = map_leaves(double, (log, [1]))
    assert result == ([], [2])
    assert result[0] is log


def layout(value: object) -> object:
    return flattened(value, [])


def test_layouts_are_those_of_containers_alone() -> None:
    value, other = ((Plain(x), {"k": [x, None]}, Options(x), Point(x, x)) for x in ((), 3.0))
    assert layout(value) != layout(other)  # An empty tuple is a container.
    value, other = ((Plain(x), {"k": [x, None]}, Options(x), Point(x, x)) for x in ("a", 3.0))
    assert layout(value) == layout(other)


@pytest.mark.parametrize(
    "other", [{"b": 1}, [1], Plain(1), Options(1), Output(a=1), OrderedDict(a=1), 1, {"a": [1]}]
)
def test_layouts_of_different_containers(other: object) -> None:
    assert layout([{"a": 1}]) != layout([other])


def test_a_packed_sequence_and_a_class_are_leaves() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert leaves([packed, Plain]) == [packed, Plain]
