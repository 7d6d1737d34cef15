"""Relations between the events of an execution: row i is the set of j with (i, j), as bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Relation = list[int]


def bits(row: int) -> Iterator[int]:
    while row:
        low = row & -row
        yield low.bit_length() - 1
        row ^= low


def build(size: int, holds: Callable[[int, int], bool]) -> Relation:
    return [sum(1 << j for j in range(size) if holds(i, j)) for i in range(size)]


def union(*relations: Relation) -> Relation:
    result = list(relations[0])
    for relation in relations[1:]:
        for i, row in enumerate(relation):
            result[i] |= row
    return result


def intersect(*relations: Relation) -> Relation:
    result = list(relations[0])
    for relation in relations[1:]:
        for i, row in enumerate(relation):
            result[i] &= row
    return result


def compose(a: Relation, b: Relation) -> Relation:
    result = []
    for row in a:
        reached = 0
        for j in bits(row):
            reached |= b[j]
        result.append(reached)
    return result


def inverse(a: Relation) -> Relation:
    result = [0] * len(a)
    for i, row in enumerate(a):
        for j in bits(row):
            result[j] |= 1 << i
    return result


def closure(a: Relation) -> Relation:
    """The transitive closure."""
    result = list(a)
    for k in range(len(result)):
        bit, through = 1 << k, result[k]
        if through:
            for i, row in enumerate(result):
                if row & bit:
                    result[i] = row | through
    return result


def reflexive(a: Relation) -> Relation:
    return [row | 1 << i for i, row in enumerate(a)]


def restrict(a: Relation, first: int, second: int) -> Relation:
    """The pairs from the set ``first`` to the set ``second``."""
    return [row & second if first >> i & 1 else 0 for i, row in enumerate(a)]


def has_loop(a: Relation) -> bool:
    """Whether an event is related to itself."""
    return any(row >> i & 1 for i, row in enumerate(a))


def is_acyclic(a: Relation) -> bool:
    return not has_loop(closure(a))
