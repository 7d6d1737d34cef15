"""Reads what nvdisasm prints: the instructions of each kernel, where they branch to, and loops."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

SECTION = re.compile(r"^\t\.section\t\.text\.(\S+?),", re.MULTILINE)
LINE = re.compile(
    r"^(?P<label>[.$\w]+):$"
    r"|^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;",
    re.MULTILINE,
)
TARGET = re.compile(r"`\(([^)]+)\)")

# Sizes of loads and stores, by a part of the opcode; 4 bytes where there is none.
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


class Instruction(NamedTuple):
    guard: str  # the predicate under which it runs, such as "P0" or "!UP1"; "": always
    opcode: str
    operands: str

    def __str__(self) -> str:
        return f"{f'@{self.guard} ' if self.guard else ''}{self.opcode} {self.operands}".strip()

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def width(self) -> int:
        """The bytes that a load or store moves."""
        return next((WIDTHS[part] for part in self.parts if part in WIDTHS), 4)

    @property
    def is_load(self) -> bool:
        """Of global memory, or of memory whose kind only the address tells."""
        return self.name in ("LDG", "LD")

    @property
    def is_store(self) -> bool:
        return self.name in ("STG", "ST")


@dataclass(frozen=True)
class Loop:
    """An innermost loop: all instructions between which it may go around."""

    places: tuple[int, ...]  # in the kernel; the first is where the loop begins
    body: tuple[Instruction, ...]

    def __len__(self) -> int:
        return len(self.body)

    def moves(self) -> Counter[tuple[str, int]]:
        """How many loads and stores there are of each name and width."""
        names = ("LDG", "LD", "LDS", "STG", "ST", "STS")
        return Counter((i.name, i.width) for i in self.body if i.name in names)


class Kernel:
    """The instructions of one kernel, with those of the functions that it calls."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for match in LINE.finditer(text):
            if match["label"]:
                self.labels[match["label"]] = len(self.instructions)
            else:
                self.instructions.append(
                    Instruction(match["guard"] or "", match["opcode"], match["operands"])
                )

    @cached_property
    def successors(self) -> list[list[int]]:
        """Where each instruction may continue. A call of a function continues behind itself."""
        return [list(self._successors(at)) for at in range(len(self.instructions))]

    def _successors(self, at: int) -> Iterator[int]:
        instruction = self.instructions[at]
        branches = instruction.name in ("BRA", "BRX", "JMP")
        # Compilers also use calls to jump to an end of the kernel.
        if branches or (instruction.name == "CALL" and "`(.L_x_" in instruction.operands):
            # The targets of a BRX are listed behind it, without parentheses.
            found = TARGET.findall(instruction.operands) or re.findall(
                r"\.L_x_\d+", instruction.operands
            )
            yield from (self.labels[target] for target in found)
        always = not instruction.guard and (
            instruction.name in ("EXIT", "RET", "BRX")
            or (branches and instruction.operands.startswith("`("))
        )
        if not always and at + 1 < len(self.instructions):
            yield at + 1

    @cached_property
    def predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.instructions]
        for at, successors in enumerate(self.successors):
            for successor in successors:
                found[successor].append(at)
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """The innermost loops, in the order of their addresses."""
        bodies: dict[int, set[int]] = {}
        for at, successors in enumerate(self.successors):
            for head in successors:
                if head <= at:
                    body = self._reaching(at, head)
                    if 0 not in body or head == 0:  # else it is a jump back, but no loop
                        bodies.setdefault(head, set()).update(body)
        return [
            Loop(places, tuple(self.instructions[at] for at in places))
            for places in map(tuple, map(sorted, bodies.values()))
            if not set(places[1:]) & bodies.keys()
        ]

    def least_around(self, loop: Loop) -> int:
        """The least instructions before and after a loop of a thread that enters it."""
        before = self._distances([0], self.successors)[loop.places[0]]
        ends = [at for at, i in enumerate(self.instructions) if i.name == "EXIT"]
        after = self._distances(ends, self.predecessors)
        return before + min(after[at] for at in loop.places if at in after)

    def _distances(self, waiting: list[int], following: list[list[int]]) -> dict[int, int]:
        distances = dict.fromkeys(waiting, 0)
        for at in waiting:
            for other in following[at]:
                if other not in distances:
                    distances[other] = distances[at] + 1
                    waiting.append(other)
        return distances

    def _reaching(self, at: int, head: int) -> set[int]:
        """The instructions from which `at` is reached without passing `head`, and these two."""
        body, waiting = {head, at}, [at] if at != head else []
        while waiting:
            for before in self.predecessors[waiting.pop()]:
                if before not in body:
                    body.add(before)
                    waiting.append(before)
        return body


def kernels(text: str) -> Iterable[Kernel]:
    """All kernels in the output of ``nvdisasm -c``."""
    parts = SECTION.split(text)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Kernel(name, body)
