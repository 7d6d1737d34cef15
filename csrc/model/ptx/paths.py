"""The paths that a thread can take, as events whose values are expressions of what it reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Union

from ptx.program import Instruction, Thread, Unsupported

ROUNDS = 2  # Of loops that jump backwards.

# A number; the value read by the n-th event of the thread; or an operation on such.
Value = Union[int, "Read", "Term"]

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@dataclass(frozen=True)
class Read:
    event: int


@dataclass(frozen=True)
class Term:
    operation: str  # Of ARITHMETIC; or "cas": (old, expected, new).
    operands: tuple[Value, ...]


@dataclass
class Event:
    kind: str  # R, W, F (fence), P (proxy fence), B (barrier)
    text: str
    order: str = "weak"
    scope: str = ""
    proxy: str = "generic"
    place: str = ""
    value: Value = 0  # Of a W.
    partner: int = -1  # Of the W of an atomic operation: its R.
    # The reads and reducing barriers that its address, value or execution depends on.
    depends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Constraint:
    comparison: str
    left: Value
    right: Value
    holds: bool


@dataclass
class Path:
    events: list[Event] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    registers: dict[str, Value] = field(default_factory=dict)


def reads(value: Value) -> frozenset[int]:
    if isinstance(value, Read):
        return frozenset([value.event])
    if isinstance(value, Term):
        return frozenset().union(*(reads(operand) for operand in value.operands))
    return frozenset()


def paths(thread: Thread) -> Iterator[Path]:
    labels = {i.place: n for n, i in enumerate(thread.code) if i.kind == "label"}
    start = Path(registers=dict(thread.registers))
    yield from _follow(thread.code, labels, 0, start, frozenset(), ROUNDS)


def _follow(
    code: list[Instruction],
    labels: dict[str, int],
    at: int,
    path: Path,
    control: frozenset[int],
    rounds: int,
) -> Iterator[Path]:
    def value(operand: str) -> Value:
        return path.registers.get(operand, 0) if operand[0] == "r" else int(operand)

    while at < len(code):
        instruction = code[at]
        kind, after = instruction.kind, at + 1
        if kind == "goto":
            after = labels[instruction.place]
        elif kind in ("branch", "until"):
            left, right = (value(operand) for operand in instruction.operands)
            control = control | reads(left) | reads(right)
            target = labels[instruction.place] if kind == "branch" else after
            if isinstance(left, int) and isinstance(right, int):
                if COMPARE[instruction.operation](left, right):
                    after = target
                elif kind == "until":
                    return
            else:
                compared = Constraint(instruction.operation, left, right, True)
                if kind == "branch":
                    other = Path(list(path.events), list(path.constraints), dict(path.registers))
                    other.constraints.append(Constraint(instruction.operation, left, right, False))
                    yield from _follow(code, labels, after, other, control, rounds)
                path.constraints.append(compared)
                after = target
        elif kind == "local":
            operands = tuple(value(operand) for operand in instruction.operands)
            path.registers[instruction.target] = _compute(instruction.operation, operands)
        elif kind != "label":
            _append(instruction, path, control, value)
            if instruction.operation == "red":
                control = control | {len(path.events) - 1}
        if after <= at:
            rounds -= 1
            if rounds < 0:
                return
        at = after
    yield path


def _compute(operation: str, operands: tuple[Value, ...]) -> Value:
    if operation == "mov":
        return operands[0]
    left, right = operands
    if isinstance(left, int) and isinstance(right, int):
        return ARITHMETIC[operation](left, right)
    return Term(operation, operands)


def _append(
    i: Instruction, path: Path, control: frozenset[int], value: Callable[[str], Value]
) -> None:
    events = path.events
    if i.kind in ("fence", "proxy_fence"):
        kind = "F" if i.kind == "fence" else "P"
        events.append(Event(kind, i.text, i.order, i.scope, i.proxy))
        return
    if i.kind == "barrier":
        named = tuple(value(operand) for operand in i.operands)
        if not all(isinstance(name, int) for name in named):
            raise Unsupported("a barrier whose number is read from memory")
        depends = control if i.operation == "red" else frozenset()
        events.append(Event("B", i.text, place=f"{i.place} {named}", depends=depends))
        return
    if i.kind == "store":
        stored = value(i.operands[0])
        depends = control | reads(stored)
        events.append(
            Event("W", i.text, i.order, i.scope, i.proxy, i.place, stored, depends=depends)
        )
        return
    read = len(events)
    acquires = {"acq_rel": "acquire", "release": "relaxed"}.get(i.order, i.order)
    events.append(Event("R", i.text, acquires, i.scope, i.proxy, i.place, depends=control))
    if i.kind == "atom":
        operands = tuple(value(operand) for operand in i.operands)
        if i.operation == "exch":
            stored = operands[0]
        elif i.operation == "cas":
            stored = Term("cas", (Read(read), *operands))
        elif i.operation in ARITHMETIC:
            stored = Term(i.operation, (Read(read), *operands))
        else:
            raise Unsupported(i.text)
        releases = {"acq_rel": "release", "acquire": "relaxed"}.get(i.order, i.order)
        depends = control | reads(stored)
        events.append(
            Event("W", i.text, releases, i.scope, i.proxy, i.place, stored, read, depends)
        )
    if i.target:
        path.registers[i.target] = Read(read)
