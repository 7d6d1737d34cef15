"""All consistent executions of a program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ptx.axioms import Causality, Frame, Node
from ptx.paths import ARITHMETIC, COMPARE, Constraint, Event, Path, Read, Term, Value, paths
from ptx.program import Program
from ptx.relations import Relation, bits, inverse


@dataclass
class Execution:
    program: Program
    causality: Causality
    coherence: Relation
    source: dict[int, int]  # Read -> the write that it reads.
    registers: list[dict[str, Value]]  # Of each thread.

    def evaluate(self, value: Value) -> int:
        if isinstance(value, int):
            return value
        if isinstance(value, Read):
            source = self.source[value.event]
            return self.evaluate(self.causality.frame.nodes[source].event.value)
        operands = [self.evaluate(operand) for operand in value.operands]
        if value.operation == "cas":
            old, expected, new = operands
            return new if old == expected else old
        return ARITHMETIC[value.operation](*operands)

    def outcomes(self) -> Iterator[bool]:
        """Whether the condition holds, for each last write that locations in it may have."""
        nodes = self.causality.frame.nodes
        last: dict[str, set[int]] = {}
        for i, node in enumerate(nodes):
            if node.event.kind == "W" and not self.coherence[i]:
                last.setdefault(node.memory, set()).add(self.evaluate(node.event.value))
        code = compile(self.program.condition, self.program.name, "eval")
        places = [p for p in last if f"value(None, '{p}')" in self.program.condition]
        for chosen in itertools.product(*(last[place] for place in places)):
            final = dict(zip(places, chosen, strict=True))

            def value(thread: int | None, name: str, final: dict[str, int] = final) -> int:
                if thread is None:
                    return final[self.program.physical[name]]
                return self.evaluate(self.registers[thread].get(name, 0))

            yield bool(eval(code, {"value": value}))

    def __str__(self) -> str:
        nodes = self.causality.frame.nodes
        lines = []
        for read, write in sorted(self.source.items()):
            node, source = nodes[read], nodes[write]
            origin = f"P{source.thread}: {source.event.text}" if source.thread >= 0 else "the start"
            value = self.evaluate(source.event.value)
            lines.append(f"P{node.thread}: {node.event.text} reads {value} of {origin}")
        lines += [
            f"race: P{nodes[i].thread}: {nodes[i].event.text}"
            f" and P{nodes[j].thread}: {nodes[j].event.text}"
            for i, j in self.causality.races()
        ]
        return "\n".join(lines)


@dataclass
class _Search:
    """The executions in which each thread takes a given path."""

    program: Program
    nodes: list[Node]
    constraints: list[Constraint]
    registers: list[dict[str, Value]]
    source: dict[int, int] = field(default_factory=dict)

    def run(self) -> Iterator[Execution]:
        for fences in self._fence_orders():
            frame = Frame(self.nodes, fences)
            reads = [i for i, node in enumerate(self.nodes) if node.event.kind == "R"]
            position = {i: i - self._first(i) for i in reads}
            reads.sort(key=lambda i: (position[i], i))
            candidates = {i: self._candidates(i) for i in reads}
            yield from self._assign(frame, reads, candidates, 0, [0] * len(self.nodes))

    def _first(self, i: int) -> int:
        return next(j for j, n in enumerate(self.nodes) if n.thread == self.nodes[i].thread)

    def _fence_orders(self) -> Iterator[Relation]:
        """All orders of the morally strong fence.sc."""
        none = [0] * len(self.nodes)
        fences = [
            i for i, n in enumerate(self.nodes) if n.event.kind == "F" and n.event.order == "sc"
        ]
        strong = Frame(self.nodes, none).morally_strong if len(fences) > 1 else none
        pairs = [(i, j) for i, j in itertools.combinations(fences, 2) if strong[i] >> j & 1]
        for flips in itertools.product((False, True), repeat=len(pairs)):
            order = list(none)
            for (i, j), flip in zip(pairs, flips, strict=True):
                order[j if flip else i] |= 1 << (i if flip else j)
            yield order

    def _candidates(self, read: int) -> list[int]:
        node = self.nodes[read]
        return [
            i
            for i, other in enumerate(self.nodes)
            if other.event.kind == "W"
            and other.memory == node.memory
            and other.event.partner != read
            and self._possible(read, other.event)
        ]

    def _possible(self, read: int, write: Event) -> bool:
        """Whether no constraint on the read alone forbids it to read the write."""
        if not isinstance(write.value, int):
            return True
        for c in self.constraints:
            left = write.value if c.left == Read(read) else c.left
            right = write.value if c.right == Read(read) else c.right
            known = isinstance(left, int) and isinstance(right, int)
            if known and COMPARE[c.comparison](left, right) != c.holds:
                return False
        return True

    def _assign(
        self,
        frame: Frame,
        reads: list[int],
        candidates: dict[int, list[int]],
        done: int,
        rf: Relation,
    ) -> Iterator[Execution]:
        causality = Causality(frame, rf)
        none = [0] * len(rf)
        if not causality.allows(causality.coherence(none)):
            return
        if done == len(reads):
            yield from self._finish(causality)
            return
        read = reads[done]
        for write in candidates[read]:
            self.source[read] = write
            further = list(rf)
            further[write] |= 1 << read
            yield from self._assign(frame, reads, candidates, done + 1, further)

    def _finish(self, causality: Causality) -> Iterator[Execution]:
        none = [0] * len(self.nodes)
        execution = Execution(self.program, causality, none, dict(self.source), self.registers)
        for c in self.constraints:
            left, right = execution.evaluate(c.left), execution.evaluate(c.right)
            if COMPARE[c.comparison](left, right) != c.holds:
                return
        for coherence in self._coherences(causality, none):
            yield replace(execution, coherence=coherence)

    def _coherences(self, causality: Causality, chosen: Relation) -> Iterator[Relation]:
        """All ways to order the morally strong writes that causality leaves unordered."""
        coherence = causality.coherence(chosen)
        if not causality.allows(coherence):
            return
        frame = causality.frame
        both = [x | y for x, y in zip(coherence, inverse(coherence), strict=True)]
        for i in bits(frame.writes):
            row = frame.morally_strong[i] & frame.same_memory[i] & frame.writes & ~both[i]
            for j in bits(row):
                for first, second in ((i, j), (j, i)):
                    further = list(chosen)
                    further[first] |= 1 << second
                    yield from self._coherences(causality, further)
                return
        yield coherence


def executions(program: Program) -> Iterator[Execution]:
    choices = [list(paths(thread)) for thread in program.threads]
    for chosen in itertools.product(*choices):
        nodes = [
            Node(Event("W", "initial value", place=place, value=value), -1, (-1, -1), place, place)
            for place, value in program.initial.items()
        ]
        constraints: list[Constraint] = []
        registers = []
        for number, path in enumerate(chosen):
            path = _shift(path, len(nodes))
            constraints += path.constraints
            registers.append(path.registers)
            nodes += [
                Node(
                    event,
                    number,
                    program.threads[number].cta,
                    program.generic.get(event.place, ""),
                    program.physical.get(event.place, ""),
                )
                for event in path.events
            ]
        yield from _Search(program, nodes, constraints, registers).run()


def _shift(path: Path, by: int) -> Path:
    """The path with events numbered from ``by`` on."""

    def value(v: Value) -> Value:
        if isinstance(v, Read):
            return Read(v.event + by)
        if isinstance(v, Term):
            return Term(v.operation, tuple(value(operand) for operand in v.operands))
        return v

    events = [
        replace(
            e,
            value=value(e.value),
            partner=e.partner + by if e.partner >= 0 else -1,
            depends=frozenset(read + by for read in e.depends),
        )
        for e in path.events
    ]
    constraints = [replace(c, left=value(c.left), right=value(c.right)) for c in path.constraints]
    return Path(events, constraints, {name: value(v) for name, v in path.registers.items()})


def passes(program: Program) -> bool:
    """Whether what the test says of its executions is true."""
    wanted = program.quantifier != "forall"
    found = any(
        outcome is wanted for execution in executions(program) for outcome in execution.outcomes()
    )
    return found if program.quantifier == "exists" else not found
