"""The axioms of PTX's memory model: which executions of given events are consistent.

After "Memory Consistency Model" in the PTX ISA (7.5 and later, with proxies), and its formal version:
Lustig, Sahasrabuddhe, Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS
2019). Names are theirs. Coherence is a partial order: only writes that are morally strong, or of which
one causes the other, are in it.
"""

from __future__ import annotations

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


def _strong(node: Node) -> bool:
    return node.event.kind == "F" or (node.event.kind in "RW" and node.event.order != "weak")


class Frame:
    """What all executions of the same events have in common."""

    def __init__(self, nodes: list[Node], fences_first: Relation):
        self.nodes = nodes
        size = len(nodes)
        kinds = {
            kind: sum(1 << i for i, n in enumerate(nodes) if n.event.kind == kind) for kind in "RWF"
        }
        self.writes = kinds["W"]
        self.initial = sum(1 << i for i, n in enumerate(nodes) if n.thread < 0)

        def relation(holds: object) -> Relation:
            return build(size, lambda i, j: bool(holds(nodes[i], nodes[j])))  # type: ignore[operator]

        def memory(a: Node, b: Node) -> bool:
            return a.event.kind in "RW" and b.event.kind in "RW"

        self.po = build(
            size, lambda i, j: i < j and nodes[i].thread == nodes[j].thread and nodes[i].thread >= 0
        )
        self.same_memory = relation(lambda a, b: memory(a, b) and a.memory == b.memory)
        self.same_address = relation(lambda a, b: memory(a, b) and a.address == b.address)
        same_cta = relation(lambda a, b: a.thread >= 0 and b.thread >= 0 and a.cta == b.cta)
        same_proxy = relation(
            lambda a, b: a.event.kind != "B" != b.event.kind and a.event.proxy == b.event.proxy
        )
        po_or_scope = union(
            self.po,
            inverse(self.po),
            relation(
                lambda a, b: _strong(a) and _strong(b) and _in_scope(a, b) and _in_scope(b, a)
            ),
        )
        overlap = relation(lambda a, b: not memory(a, b) or a.address == b.address)
        strong = intersect(intersect(po_or_scope, same_proxy), overlap)
        self.morally_strong = [row & ~(1 << i) for i, row in enumerate(strong)]

        barriers = relation(
            lambda a, b: a.event.kind == b.event.kind == "B" and a.event.place == b.event.place
        )
        self.fences_first = fences_first
        self.static = closure(union(self.po, intersect(barriers, same_cta), fences_first))

        def some(kind: str, *orders: str) -> int:
            return sum(
                1 << i
                for i, n in enumerate(nodes)
                if n.event.kind == kind and n.event.order in orders
            )

        every = (1 << size) - 1
        po_address = intersect(self.po, self.same_address)
        writes, reads = some("W", "relaxed", "release"), some("R", "relaxed", "acquire")
        fences = some("F", "acq_rel", "sc")
        # A release is seen through a strong write, an acquire sees through a strong read.
        self.release = union(
            restrict(reflexive(po_address), some("W", "release"), writes),
            restrict(self.po, fences, writes),
        )
        self.acquire = union(
            restrict(reflexive(po_address), reads, some("R", "acquire")),
            restrict(self.po, reads, fences),
        )
        self.rmw = [0] * size
        self.depends = [0] * size
        for i, node in enumerate(nodes):
            if node.event.partner >= 0:
                self.rmw[node.event.partner] |= 1 << i
            for source in node.event.depends:
                self.depends[source] |= 1 << i
                if node.event.kind == "B":  # What one thread contributes, all threads get.
                    self.depends[source] |= barriers[i] & same_cta[i]
        self.program_order = po_address
        self.generic = sum(
            1 << i for i, n in enumerate(nodes) if n.event.kind in "RW" and n.event.proxy == "generic"
        )
        self.mixed = any(n.event.proxy != "generic" for n in nodes) or any(
            n.address != n.memory for n in nodes
        )
        self.same_cta_and_proxy = intersect(intersect(same_cta, same_proxy), self.same_address)
        self.proxy_fence = restrict(
            intersect(same_proxy, same_cta),
            sum(1 << i for i, n in enumerate(nodes) if n.event.kind in "FP"),
            every & ~sum(1 << i for i, n in enumerate(nodes) if n.event.kind in "FPB"),
        )
        self.alias_fences = sum(
            1 << i
            for i, n in enumerate(nodes)
            if n.event.kind == "P" and n.event.proxy == "alias"
        )

    def preserved(self, base: Relation) -> Relation:
        """The part of base causality that proxies preserve: same-address pairs of memory operations."""
        same = intersect(base, self.same_address)
        result = restrict(same, self.generic, self.generic)
        if not self.mixed:
            return result
        every = (1 << len(self.nodes)) - 1
        # From an operation to a fence of its proxy behind it; from such a fence to an operation.
        fenced = intersect(base, inverse(self.proxy_fence))
        unfenced = intersect(base, self.proxy_fence)
        starts = union(restrict(reflexive([0] * len(base)), self.generic, every), fenced)
        ends = union(restrict(reflexive([0] * len(base)), self.generic, every), unfenced)
        across = compose(compose(starts, base), ends)
        through = compose(restrict(base, every, self.alias_fences), base)
        aliased = compose(compose(starts, through), ends)
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
        return is_acyclic(union(communication, frame.program_order))  # SC per location.

    def races(self) -> list[tuple[int, int]]:
        """Conflicting accesses that are neither ordered by causality nor morally strong."""
        frame = self.frame
        found = []
        for i, row in enumerate(frame.same_memory):
            ordered = self.base[i] | frame.morally_strong[i] | frame.initial | 1 << i
            for j in bits(row & ~ordered):
                conflict = (frame.writes >> i | frame.writes >> j) & 1
                if i < j and conflict and not self.base[j] >> i & 1 and not frame.initial >> i & 1:
                    found.append((i, j))
        return found
