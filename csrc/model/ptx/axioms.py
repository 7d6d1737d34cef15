"""The axioms of PTX's memory model: which executions of given events are consistent.

After "Memory Consistency Model" in the PTX ISA (7.5 and later, with proxies), and its formal
version: Lustig, Sahasrabuddhe, Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency
Model" (ASPLOS 2019). Names are theirs. Coherence is a partial order: it orders writes that are
morally strong, and those of which one causes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ptx.paths import Event
from ptx.relations import (
    Relation,
    bits,
    build,
    closure,
    compose,
    has_loop,
    intersect,
    inverse,
    is_acyclic,
    reflexive,
    restrict,
    union,
)


class Node(NamedTuple):
    """An event in its place. Initial writes belong to thread -1."""

    event: Event
    thread: int
    cta: tuple[int, int]
    address: str  # In the generic proxy.
    memory: str


def _in_scope(a: Node, b: Node) -> bool:
    """Whether the scope of ``a`` includes the thread of ``b``."""
    if a.event.scope == "sys":
        return True
    return a.cta == b.cta if a.event.scope == "cta" else a.cta[0] == b.cta[0]


def _is_strong(node: Node) -> bool:
    return node.event.kind == "F" or (node.event.kind in "RW" and node.event.order != "weak")


class Frame:
    """What all executions of the same events have in common."""

    def __init__(self, nodes: list[Node], fences_first: Relation):
        self.nodes = nodes
        self.fences_first = fences_first  # The order of the fence.sc.

        def events(holds: Callable[[Node], bool]) -> int:
            return sum(1 << i for i, node in enumerate(nodes) if holds(node))

        def pairs(holds: Callable[[Node, Node], bool]) -> Relation:
            return build(len(nodes), lambda i, j: holds(nodes[i], nodes[j]))

        def some(kind: str, *orders: str) -> int:
            return events(lambda n: n.event.kind == kind and n.event.order in orders)

        memory = events(lambda n: n.event.kind in "RW")
        self.writes = events(lambda n: n.event.kind == "W")
        self.initial = events(lambda n: n.thread < 0)
        self.generic = memory & events(lambda n: n.event.proxy == "generic")
        self.alias_fences = events(lambda n: n.event.kind == "P" and n.event.proxy == "alias")
        # Whether anything may be accessed in more than one way.
        self.mixed = self.generic != memory or any(n.address != n.memory for n in nodes)

        one_thread = pairs(lambda a, b: a.thread == b.thread and a.thread >= 0)
        po = intersect(one_thread, build(len(nodes), lambda i, j: i < j))
        both_memory = restrict(pairs(lambda a, b: True), memory, memory)
        self.same_memory = intersect(both_memory, pairs(lambda a, b: a.memory == b.memory))
        self.same_address = intersect(both_memory, pairs(lambda a, b: a.address == b.address))
        self.po_address = intersect(po, self.same_address)
        same_cta = pairs(lambda a, b: a.cta == b.cta and a.thread >= 0)
        # Barriers have no proxy.
        same_proxy = pairs(
            lambda a, b: a.event.proxy == b.event.proxy and "B" not in (a.event.kind, b.event.kind)
        )
        in_scope = pairs(
            lambda a, b: _is_strong(a) and _is_strong(b) and _in_scope(a, b) and _in_scope(b, a)
        )
        overlap = pairs(
            lambda a, b: (
                a.address == b.address or a.event.kind not in "RW" or b.event.kind not in "RW"
            )
        )
        strong = intersect(union(one_thread, in_scope), same_proxy, overlap)
        self.morally_strong = [row & ~(1 << i) for i, row in enumerate(strong)]

        barriers = pairs(
            lambda a, b: a.event.kind == b.event.kind == "B" and a.event.place == b.event.place
        )
        barriers = intersect(barriers, same_cta)
        self.static = closure(union(po, barriers, fences_first))  # Base causality without syncs.

        # A release is seen through a strong write, an acquire sees through a strong read.
        writes, reads = some("W", "relaxed", "release"), some("R", "relaxed", "acquire")
        fences = some("F", "acq_rel", "sc")
        self.release = union(
            restrict(reflexive(self.po_address), some("W", "release"), writes),
            restrict(po, fences, writes),
        )
        self.acquire = union(
            restrict(reflexive(self.po_address), reads, some("R", "acquire")),
            restrict(po, reads, fences),
        )

        self.rmw = [0] * len(nodes)
        self.depends = [0] * len(nodes)
        for i, node in enumerate(nodes):
            if node.event.partner >= 0:
                self.rmw[node.event.partner] |= 1 << i
            for source in node.event.depends:
                self.depends[source] |= 1 << i
                if node.event.kind == "B":  # What one thread contributes, all threads get.
                    self.depends[source] |= barriers[i]

        self.same_cta_and_proxy = intersect(same_cta, same_proxy, self.same_address)
        proxy_fences = events(lambda n: n.event.kind in "FP")
        self.proxy_fence = restrict(intersect(same_proxy, same_cta), proxy_fences, memory)

    def preserved(self, base: Relation) -> Relation:
        """The part of base causality that proxies preserve."""
        result = restrict(intersect(base, self.same_address), self.generic, self.generic)
        if not self.mixed:
            return result
        every = (1 << len(self.nodes)) - 1
        generic = [self.generic & 1 << i for i in range(len(self.nodes))]
        # From an operation to a fence of its proxy behind it; from such a fence to an operation.
        starts = union(generic, intersect(base, inverse(self.proxy_fence)))
        ends = union(generic, intersect(base, self.proxy_fence))
        across = compose(compose(starts, base), ends)
        through_alias = compose(restrict(base, every, self.alias_fences), base)
        aliased = compose(compose(starts, through_alias), ends)
        return union(
            result,
            intersect(base, self.same_cta_and_proxy),
            intersect(across, self.same_address),
            intersect(aliased, self.same_memory),
        )


class Causality:
    """What follows from a reads-from relation, complete or not yet: it only grows with it."""

    def __init__(self, frame: Frame, rf: Relation):
        self.frame, self.rf = frame, rf
        observed = intersect(frame.morally_strong, rf)
        # Through any number of atomic operations.
        self.observation = compose(reflexive(closure(compose(observed, frame.rmw))), observed)
        sync = intersect(
            compose(compose(frame.release, self.observation), frame.acquire), frame.morally_strong
        )
        news = any(row & ~known for row, known in zip(sync, frame.static, strict=True))
        self.base = closure(union(frame.static, sync)) if news else frame.static
        preserved = frame.preserved(self.base)
        self.cause = union(preserved, compose(self.observation, preserved))

    def coherence(self, chosen: Relation) -> Relation:
        """The writes to each location that come after each other, with those chosen to."""
        frame = self.frame
        caused = intersect(restrict(self.cause, frame.writes, frame.writes), frame.same_memory)
        first = restrict(frame.same_memory, frame.initial, frame.writes & ~frame.initial)
        return closure(union(caused, first, chosen))

    def allows(self, coherence: Relation) -> bool:
        """Whether no axiom is broken."""
        frame, rf = self.frame, self.rf
        if has_loop(coherence):
            return False
        before = compose(inverse(rf), coherence)  # From-reads.
        for i, row in enumerate(union(rf, before)):
            for j in bits(row):
                if self.cause[j] >> i & 1:
                    return False  # Causality.
        strong = frame.morally_strong
        between = compose(intersect(strong, before), intersect(strong, coherence))
        if any(x & y for x, y in zip(between, frame.rmw, strict=True)):
            return False  # Atomicity.
        if any(
            self.base[j] >> i & 1 for i, row in enumerate(frame.fences_first) for j in bits(row)
        ):
            return False  # Fence-SC.
        if not is_acyclic(union(rf, frame.depends)):
            return False  # No thin air.
        communication = intersect(strong, union(rf, coherence, before))
        return is_acyclic(union(communication, frame.po_address))  # SC per location.

    def races(self) -> list[tuple[int, int]]:
        """Conflicting accesses that are neither ordered by causality nor morally strong."""
        frame = self.frame
        found = []
        for i, row in enumerate(frame.same_memory):
            if frame.initial >> i & 1:
                continue
            ordered = self.base[i] | frame.morally_strong[i] | frame.initial | 1 << i
            for j in bits(row & ~ordered):
                conflict = (frame.writes >> i | frame.writes >> j) & 1
                if i < j and conflict and not self.base[j] >> i & 1:
                    found.append((i, j))
        return found
