"""Rules on the PTX and the SASS of kernels that use Hopper's asynchronous products (wgmma)."""

import re
from collections.abc import Callable
from typing import NamedTuple

from support.emitted.sass import kernels

SERIALIZED = "wgmma.mma_async instructions are serialized"  # In what ptxas reports.
_MOST_GROUPS = 8  # Committed and not waited for.

_Groups = tuple[frozenset[str], tuple[frozenset[str], ...]]  # Registers: uncommitted, committed.


class Instruction(NamedTuple):
    """An instruction, and where it leads."""

    text: str  # Without label and comments.
    after: list[int]  # Indices of the instructions that may run next.

    @property
    def is_product(self) -> bool:
        """Whether it is an asynchronous product."""
        return re.match(r"wgmma\.mma_async|(@!?U?P\w+ )?[HQI]GMMA", self.text) is not None

    @property
    def wait(self) -> int | None:
        """For a wait for groups of products: how many may stay in flight."""
        found = re.match(r"wgmma\.wait_group\S* (\d+)|WARPGROUP\.DEPBAR\S* gsb0, (\w+)", self.text)
        return None if found is None else int(found[1] or found[2], 0)


def parse_ptx(ptx: str) -> list[Instruction]:
    """The instructions of a module with one kernel."""
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


def parse_sass(sass: str) -> list[Instruction]:
    """The instructions of a kernel, as nvdisasm prints them."""
    (kernel,) = kernels(sass)
    return [
        Instruction(str(instruction), after)
        for instruction, after in zip(kernel.instructions, kernel.successors, strict=True)
    ]


def overlaps_steps(instructions: list[Instruction]) -> bool:
    """Whether products stay in flight from one iteration of a loop to the next.

    That is: a loop has a product and a wait that leaves groups in flight, and need not pass a wait
    for all of them.
    """
    open_ways = [
        [place for place in instruction.after if instructions[place].wait != 0]
        for instruction in instructions
    ]
    for at, instruction in enumerate(instructions):
        if instruction.wait:
            onward = _reached(at, open_ways.__getitem__)
            for place in onward:
                if instructions[place].is_product and at in _reached(place, open_ways.__getitem__):
                    return True
    return False


def _reached(start: int, after: Callable[[int], list[int]]) -> set[int]:
    found: set[int] = set()
    ahead = list(after(start))
    while ahead:
        place = ahead.pop()
        if place not in found:
            found.add(place)
            ahead += after(place)
    return found


def early_uses(instructions: list[Instruction]) -> list[str]:
    """Instructions of PTX that use registers of a sum whose products have not been waited for.

    Products may add to the same sum without a wait. All paths are followed.
    """
    if not any(instruction.is_product for instruction in instructions):
        return []
    wrong: dict[int, str] = {}
    names = [frozenset(re.findall(r"%\w+", instruction.text)) for instruction in instructions]
    sums = [_sum_of(instruction) for instruction in instructions]
    nothing: _Groups = (frozenset(), ())
    seen: set[tuple[int, _Groups]] = set()
    ahead = [(0, nothing)]
    while ahead:
        at, groups = ahead.pop()
        if (at, groups) in seen:
            continue
        seen.add((at, groups))
        instruction, (open_group, committed) = instructions[at], groups
        in_flight = open_group.union(*committed)
        used = names[at] - sums[at] if sums[at] <= in_flight else names[at]
        if used & in_flight:
            wrong[at] = f"{instruction.text[:80]} uses {sorted(used & in_flight)[:4]} too early"
        if instruction.is_product:
            groups = (open_group | sums[at], committed)
        elif instruction.text.startswith("wgmma.commit_group"):
            groups = (frozenset(), (*committed, open_group))
        elif instruction.wait is not None:
            groups = (open_group, committed[max(0, len(committed) - instruction.wait) :])
        if len(groups[1]) > _MOST_GROUPS:
            wrong[at] = f"{instruction.text}: more than {_MOST_GROUPS} groups are in flight"
            continue
        ahead += [(place, groups) for place in instruction.after]
    return [wrong[at] for at in sorted(wrong)]


def _sum_of(instruction: Instruction) -> frozenset[str]:
    """The registers that hold the sum of a product in PTX."""
    found = re.match(r"wgmma\.mma_async\S* {(.*?)}", instruction.text)
    return frozenset(re.findall(r"%\w+", found[1])) if found else frozenset()
