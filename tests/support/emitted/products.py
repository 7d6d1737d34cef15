"""A rule on the PTX of kernels that use Hopper's asynchronous products (wgmma)."""

import re
from collections.abc import Sequence

from support.emitted.ptx import Instruction

SERIALIZED = "wgmma.mma_async instructions are serialized"  # In what ptxas reports.
_MOST_GROUPS = 8  # Committed and not waited for.

_Groups = tuple[frozenset[str], tuple[frozenset[str], ...]]  # Registers: uncommitted, committed.


def is_product(text: str) -> bool:
    """Whether an instruction is an asynchronous product."""
    return text.startswith("wgmma.mma_async")


def wait_of(text: str) -> int | None:
    """For a wait for groups of products: how many may stay in flight."""
    found = re.match(r"wgmma\.wait_group\S* (\d+)", text)
    return None if found is None else int(found[1])


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
