"""The rules on machine code; each returns what breaks it, one line each.

PTX says which accesses are meant to order others. What looks like a plain strong access in machine
code (SASS) orders others by what stands next to it: a release by a fence before it, an acquire by
the invalidation of the L1 cache behind it.
"""

import re
from collections.abc import Container

from support.emitted import ptx as ptx_code
from support.emitted.ptx import parse
from support.emitted.sass import Instruction, Kernel

ACCESS = re.compile(r"(ld|st|atom|red|membar|fence)[.\w:]*")
ORDERED = re.compile(
    r"volatile|relaxed|acquire|release|acq_rel|sc\b|mmio|^atom|^red|^membar|^fence"
)
ATOMICS = ("ATOM", "ATOMG", "RED")
TYPE = re.compile(r"\.(v[248]|[busf]\d+|b128)\b")


def non_coherent_loads(kernel: Kernel) -> list[str]:
    """Loads through a cache that does not see what other devices write while the kernel runs."""
    marks = {"CONSTANT", "NC"}
    return [str(i) for i in kernel.instructions if i.is_load and marks & set(i.parts)]


def non_coherent_loads_of_ptx(ptx: str) -> list[str]:
    return [opcode for opcode in accesses(ptx) if ".nc" in opcode]


def accesses(ptx: str) -> list[str]:
    """The opcodes of all accesses of memory, and of fences."""
    found = (ACCESS.match(instruction.unguarded) for instruction in parse(ptx))
    return [match[0] for match in found if match]


def local_memory(kernel: Kernel) -> list[str]:
    """Registers or arrays that have been put into memory."""
    return [str(i) for i in kernel.instructions if i.name in ("LDL", "STL")]


def ordered_accesses(ptx: str) -> list[str]:
    """All atomic, volatile and ordering accesses of PTX, without types: ld.acquire.sys.global."""
    found = [opcode for opcode in accesses(ptx) if not opcode.endswith(".param")]
    return [TYPE.sub("", opcode) for opcode in found if ORDERED.search(opcode)]


def polls_without_acquire(ptx: str) -> list[str]:
    """Relaxed loads from whose success no way leads to an acquire, or to another poll.

    A poll succeeds where its value has reached its target. A way ends at the first barrier or plain
    access. A comparison with zero is only a look at a flag: whoever sees it set gives up.
    """
    code = parse(ptx)
    polls = {
        at: begin
        for at, instruction in enumerate(code)
        if instruction.text.startswith("ld.relaxed") and (begin := _where_polls_end(code, at))
    }
    return [
        code[at].text
        for at, begin in polls.items()
        if not _reaches_acquire(code, begin, polls.keys())
    ]


def _where_polls_end(code: list[ptx_code.Instruction], at: int) -> list[int]:
    """Where it goes on if what a relaxed load has read is at least the target."""
    value = re.findall(r"%\w+", code[at].text)[0]
    found = []
    for place in range(at + 1, min(at + 20, len(code))):
        compared = re.match(r"setp\.(ge|gt|le|lt)\.\w+\s+(%p\d+), ([^,]+), (.+)", code[place].text)
        if compared and value in (compared[3], compared[4]):
            reached = (compared[1][0] == "g") == (compared[3] == value)
            branch = next(at for at in range(place + 1, len(code)) if "bra" in code[at].text)
            taken = re.match(rf"@(!?){compared[2]}\s+bra", code[branch].text)
            if taken:  # else the comparison only decides whether to poll again
                jumps = reached == (taken[1] == "")
                found.append(code[branch].after[0] if jumps else branch + 1)
    return found


def _reaches_acquire(
    code: list[ptx_code.Instruction], begin: list[int], polls: Container[int]
) -> bool:
    """Whether there is an acquire, or another poll, before barriers and plain accesses."""
    plain = r"bar|ret|atom|st\.(?!param|shared|local)|ld\.(?!param|shared|local|relaxed)"
    seen, waiting = set(begin), list(begin)
    while waiting:
        place = waiting.pop()
        text = code[place].unguarded
        if text.startswith("ld.acquire") or place in polls:
            return True
        if not re.match(plain, text):
            waiting += set(code[place].after) - seen
            seen.update(code[place].after)
    return False


def is_strong(instruction: Instruction, scope: str) -> bool:
    return {"STRONG", scope} <= set(instruction.parts)


def unfenced_stores(kernel: Kernel) -> list[str]:
    """Strong stores of system scope that are reached without a fence of that scope before them."""
    return [
        str(instruction)
        for at, instruction in enumerate(kernel.instructions)
        if instruction.is_store
        and is_strong(instruction, "SYS")
        and not _is_fenced(kernel, at, "SYS")
    ]


def lost_fences(kernel: Kernel, ptx: str) -> int:
    """How many releases of the PTX are no fenced store in machine code. For kernels whose relaxed
    stores look like releases there."""
    fenced = [
        at
        for at, instruction in enumerate(kernel.instructions)
        if instruction.is_store and is_strong(instruction, "SYS") and _is_fenced(kernel, at, "SYS")
    ]
    releases = sum(access.startswith("st.release.sys") for access in ordered_accesses(ptx))
    return max(releases - len(fenced), 0)


def unfenced_exchanges(kernel: Kernel) -> list[str]:
    """Atomic exchanges without a fence before them, or without an invalidation behind them."""
    return [
        str(instruction)
        for at, instruction in enumerate(kernel.instructions)
        if instruction.name in ATOMICS
        and not (_is_fenced(kernel, at, "GPU") and _is_invalidated(kernel, at))
    ]


def _is_fenced(kernel: Kernel, at: int, scope: str) -> bool:
    """Whether all ways to an instruction pass a fence, and no other store behind that."""
    guard = kernel.instructions[at].guard
    seen, waiting = {at}, [at]
    while waiting:
        before = kernel.predecessors[waiting.pop()]
        if not before:
            return False
        for place in before:
            instruction = kernel.instructions[place]
            if instruction.name == "MEMBAR" and instruction.guard in ("", guard):
                if {scope, "SYS"} & set(instruction.parts):
                    continue
                return False
            writes = instruction.is_store or instruction.name in (*ATOMICS, "CALL")
            # Conservative: any mention of the guard may redefine it.
            if writes or (guard and re.search(rf"\b{guard.strip('!')}\b", instruction.operands)):
                return False
            if place not in seen:
                seen.add(place)
                waiting.append(place)
    return True


def lost_invalidations(kernel: Kernel, ptx: str) -> int:
    """How many acquires of the PTX have no invalidation of the cache in the machine code.

    The load itself may be gone: after a poll that has read the value, nobody needs it.
    """
    invalidations = sum(i.opcode.startswith("CCTL.IVALL") for i in kernel.instructions)
    invalidations -= sum(
        instruction.name in ATOMICS and _is_invalidated(kernel, at)
        for at, instruction in enumerate(kernel.instructions)
    )
    acquires = sum(".acquire" in access for access in ordered_accesses(ptx))
    return max(acquires - invalidations, 0)


def _is_invalidated(kernel: Kernel, at: int) -> bool:
    """Whether CCTL.IVALL comes before other accesses, barriers and branches."""
    guard = kernel.instructions[at].guard
    for instruction in kernel.instructions[at + 1 :]:
        if instruction.opcode.startswith("CCTL.IVALL") and instruction.guard in ("", guard):
            return True
        accesses = instruction.is_load or instruction.is_store
        if accesses or instruction.name in (*ATOMICS, "BAR", "BRA", "CALL", "EXIT"):
            return False
    return False
