"""Rules on the PTX and the SASS of kernels that use Hopper's asynchronous products (wgmma)."""

import re
from collections.abc import Callable, Sequence

from support.emitted.ptx import Instruction
from support.emitted.sass import Kernel

SERIALIZED = "wgmma.mma_async instructions are serialized"  # In what ptxas reports.
_MOST_GROUPS = 8  # Committed and not waited for.

_Groups = tuple[frozenset[str], tuple[frozenset[str], ...]]  # Registers: uncommitted, committed.


def is_product(text: str) -> bool:
    """Whether an instruction is an asynchronous product."""
    return re.match(r"wgmma\.mma_async|(@!?U?P\w+ )?[HQI]GMMA", text) is not None


def wait_of(text: str) -> int | None:
    """For a wait for groups of products: how many may stay in flight."""
    found = re.match(r"wgmma\.wait_group\S* (\d+)|WARPGROUP\.DEPBAR\S* gsb0, (\w+)", text)
    return None if found is None else int(found[1] or found[2], 0)


def of_sass(kernel: Kernel) -> list[Instruction]:
    """The instructions of a kernel's SASS as those of PTX."""
    return list(map(Instruction, map(str, kernel.instructions), kernel.successors))


def overlaps_steps(instructions: Sequence[Instruction]) -> bool:
    """Whether products stay in flight from one iteration of a loop to the next.

    That is: a loop has a product and a wait that leaves groups in flight, and need not pass a wait
    for all of them.
    """
    open_ways = [
        [place for place in instruction.after if wait_of(instructions[place].text) != 0]
        for instruction in instructions
    ]
    for at, instruction in enumerate(instructions):
        if wait_of(instruction.text):
            onward = _reached(at, open_ways.__getitem__)
            for place in onward:
                if is_product(instructions[place].text) and at in _reached(
                    place, open_ways.__getitem__
                ):
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


def early_uses(instructions: Sequence[Instruction]) -> list[str]:
    """Instructions of PTX that use registers of a sum whose products have not been waited for.

    Products may add to the same sum without a wait. All paths are followed.
    """
    if not any(is_product(instruction.text) for instruction in instructions):
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
        if is_product(instruction.text):
            groups = (open_group | sums[at], committed)
        elif instruction.text.startswith("wgmma.commit_group"):
            groups = (frozenset(), (*committed, open_group))
        elif (left := wait_of(instruction.text)) is not None:
            groups = (open_group, committed[max(0, len(committed) - left) :])
        if len(groups[1]) > _MOST_GROUPS:
            wrong[at] = f"{instruction.text}: more than {_MOST_GROUPS} groups are in flight"
            continue
        ahead += [(place, groups) for place in instruction.after]
    return [wrong[at] for at in sorted(wrong)]


def _sum_of(instruction: Instruction) -> frozenset[str]:
    """The registers that hold the sum of a product in PTX."""
    found = re.match(r"wgmma\.mma_async\S* {(.*?)}", instruction.text)
    return frozenset(re.findall(r"%\w+", found[1])) if found else frozenset()
