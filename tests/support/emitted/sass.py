"""Reads what nvdisasm prints: the instructions of each kernel, and where they branch to."""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

SECTION = re.compile(r"^\t\.section\t\.text\.(\S+?),", re.MULTILINE)
LINE = re.compile(
    r"^(?P<label>[.$\w]+):$"
    r"|^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;",
    re.MULTILINE,
)
TARGET = re.compile(r"`\(([^)]+)\)")


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
    def is_load(self) -> bool:
        """Of global memory, or of memory whose kind only the address tells."""
        return self.name in ("LDG", "LD")

    @property
    def is_store(self) -> bool:
        return self.name in ("STG", "ST")


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


def kernels(text: str) -> Iterable[Kernel]:
    """All kernels in the output of ``nvdisasm -c``."""
    parts = SECTION.split(text)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Kernel(name, body)
