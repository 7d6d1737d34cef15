"""Reads PTX: the instructions of a kernel, and where they lead."""

import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """An instruction, and where it leads."""

    text: str  # Without label and comments.
    after: list[int]  # Indices of the instructions that may run next; a branch's target is first.

    @property
    def unguarded(self) -> str:
        """The text without the predicate under which it runs."""
        return re.sub(r"^@!?%p\d+\s+", "", self.text)


def parse(ptx: str) -> list[Instruction]:
    """The instructions of PTX with one kernel, and of the functions behind it."""
    code = re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", ptx[ptx.index(".entry") :], flags=re.MULTILINE)
    code = code[code.index(")") :]
    texts: list[str] = []
    labels: dict[str, list[int]] = {}
    for statement in code[code.index("{") + 1 :].split(";"):
        while found := re.match(r"[{}\s]*([$\w]+):", statement):
            labels.setdefault(found[1], []).append(len(texts))
            statement = statement[found.end() :]
        text = " ".join(statement.strip("{} \t\n").split())
        if text and not text.startswith("."):
            texts.append(text)
    instructions = []
    for at, text in enumerate(texts):
        guard, bare = text.split(" ", 1) if text[0] == "@" else ("", text)
        after = []
        target = re.match(r"bra\S* ([$\w]+)", bare)
        if target:
            # Inline assembly repeats its labels in scopes of their own; its loops go backwards.
            places = labels[target[1]]
            after.append(max((place for place in places if place <= at), default=places[0]))
        goes_on = guard or not (target or bare.startswith(("ret", "exit", "trap")))
        if goes_on and at + 1 < len(texts):
            after.append(at + 1)
        instructions.append(Instruction(text, after))
    return instructions
