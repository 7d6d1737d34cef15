"""Litmus tests of PTX: their text, as threads of instructions and a condition on final values.

Threads are columns, as in published tests, or sections, one instruction a line::

    PTX name
    { x = 0; y = 0; t @ texture aliases x; P1:r0 = 0; }
    P0@cta 0,gpu 0
      st.weak x, 1
      bar.cta.sync 1
    P1@cta 0,gpu 0
      bar.cta.sync 1
      ld.weak r0, x
    forall (P1:r0 == 1)

Beyond published tests there are

- ``until r0 >= 1``: a loop that is left by its last round. Executions in which the condition does
  not hold are none. Rounds before would only restrict what the last one reads;
- ``bar.cta.red 1``: __syncthreads_or() of whether what the threads have done so far has succeeded,
  behind which they go on only if all have;
- the proxy ``async``, that of TMA: ``ald``, ``ast``, ``fence.proxy.async``.

In sections, ``#`` begins a comment, and ``!`` a way to break the line; see ``variants.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")
SCOPES = ("cta", "gpu", "sys")
PROXIES = {"": "generic", "t": "texture", "su": "surface", "co": "constant", "a": "async"}
ACCESSES = ("load", "store", "atom")
COMPARISONS = {"eq": "==", "ne": "!=", "ge": ">=", "le": "<=", "gt": ">", "lt": "<"}


class Unsupported(Exception):
    """The test uses what this checker does not model."""


@dataclass(frozen=True)
class Instruction:
    text: str
    kind: str  # load store atom fence proxy_fence barrier branch until goto label local
    order: str = "weak"
    scope: str = ""
    proxy: str = "generic"
    place: str = ""  # A location, a label, a barrier, or the proxy of a fence.
    operation: str = ""
    target: str = ""  # The register that is written.
    operands: tuple[str, ...] = ()  # Registers and numbers.


@dataclass
class Thread:
    cta: tuple[int, int]  # GPU, CTA.
    code: list[Instruction] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)


@dataclass
class Program:
    name: str
    threads: list[Thread]
    initial: dict[str, int]  # Of each location that is not an alias.
    generic: dict[str, str]  # Location -> its address in the generic proxy.
    physical: dict[str, str]  # Location -> the location whose memory it is.
    quantifier: str  # exists, ~exists, forall
    condition: str  # A Python expression in value(...).


def _operands(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def parse_instruction(text: str) -> Instruction:
    text = " ".join(text.split())
    if match := re.fullmatch(r"(LC\d+):", text):
        return Instruction(text, "label", place=match[1])
    head, _, tail = text.partition(" ")
    parts, rest = head.split("."), _operands(tail)
    name = parts[0]
    if name == "until":
        left, comparison, right = tail.split()
        return Instruction(text, "until", operation=comparison, operands=(left, right))
    if name == "goto":
        return Instruction(text, "goto", place=rest[0])
    if name[0] == "b" and name[1:] in COMPARISONS:
        compare = COMPARISONS[name[1:]]
        return Instruction(
            text, "branch", operation=compare, operands=tuple(rest[:2]), place=rest[2]
        )
    if name in ("add", "sub", "mul") or (name == "ld" and len(parts) == 1):
        operation = "mov" if name == "ld" else name
        return Instruction(
            text, "local", operation=operation, target=rest[0], operands=tuple(rest[1:])
        )
    if name == "bar":
        if parts[2] not in ("sync", "red") or len(rest) > 2:
            raise Unsupported("barriers with a number of threads, or without waiting")
        return Instruction(
            text, "barrier", operation=parts[2], place=rest[0], operands=tuple(rest[1:])
        )
    if name == "fence":
        if parts[1] == "proxy":
            return Instruction(text, "proxy_fence", proxy=parts[2])
        return Instruction(text, "fence", parts[1], parts[2])
    stem = re.fullmatch(r"(t|su|co|a|)(ld|st|atom|red)", name)
    order, scope = parts[1], parts[2] if len(parts) > 2 else ""
    if stem is None or order not in ORDERS or (scope not in SCOPES if scope else order != "weak"):
        raise Unsupported(text)
    proxy, kind = PROXIES[stem[1]], stem[2]
    if kind == "ld":
        return Instruction(text, "load", order, scope, proxy, place=rest[1], target=rest[0])
    if kind == "st":
        return Instruction(text, "store", order, scope, proxy, rest[0], operands=tuple(rest[1:]))
    target = "" if kind == "red" else rest.pop(0)
    return Instruction(
        text, "atom", order, scope, proxy, rest[0], parts[3], target, tuple(rest[1:])
    )


def _declare(text: str, program: Program) -> None:
    for declaration in filter(None, (part.strip() for part in text.split(";"))):
        if match := re.fullmatch(r"(\w+) *@ *(\w+) +aliases +(\w+)", declaration):
            name, proxy, of = match.groups()
            program.physical[name] = program.physical[of]
            program.generic[name] = name if proxy == "generic" else program.generic[of]
        elif match := re.fullmatch(r"P(\d+) *: *(\w+) *= *(-?\d+)", declaration):
            program.threads[int(match[1])].registers[match[2]] = int(match[3])
        elif match := re.fullmatch(r"(\w+) *= *(-?\d+)", declaration):
            program.initial[match[1]] = int(match[2])
            program.generic[match[1]] = program.physical[match[1]] = match[1]
        else:
            raise Unsupported(declaration)


def _condition(text: str) -> str:
    """The condition as a Python expression."""
    text = text.replace("/\\", " and ").replace("\\/", " or ").replace("~", " not ")
    text = re.sub(r"(?<![=!<>])=(?!=)", "==", text)
    token = r"\bP?(\d+) *: *(\w+)|\b(?!and\b|or\b|not\b)([A-Za-z_]\w*)"

    def value(match: re.Match[str]) -> str:
        return f"value({match[1] or None}, {(match[2] or match[3])!r})"

    return " ".join(re.sub(token, value, text).split())


def _parse_code(lines: list[str], program: Program) -> None:
    columns = any(line.rstrip().endswith(";") for line in lines)
    for line in lines:
        cells = line.rstrip().rstrip(";").split("|") if columns else [line]
        for number, cell in enumerate(cells):
            cell = cell.strip()
            if match := re.fullmatch(r"P(\d+) *@ *cta +(\d+) *, *gpu +(\d+)", cell):
                program.threads.append(Thread((int(match[3]), int(match[2]))))
            elif cell:
                thread = program.threads[number if columns else -1]
                thread.code.append(parse_instruction(cell))


def parse(text: str) -> Program:
    text = re.sub(r"\(\*.*?\*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"[#!].*", "", re.sub(r"!=", "\0", text)).replace("\0", "!=")
    match = re.fullmatch(
        r"(.*?)\{(.*?)\}\s*;?\s*(.*?)\s*((?:~\s*)?exists|forall)\b(.*)", text, re.DOTALL
    )
    if match is None:
        raise Unsupported("no condition")
    head, declarations, code, quantifier, condition = match.groups()
    name = head.split('"')[0].split()[-1]
    quantifier = quantifier.replace(" ", "")
    program = Program(name, [], {}, {}, {}, quantifier, _condition(condition))
    _parse_code(code.splitlines(), program)
    _declare(declarations, program)
    used = {i.place for thread in program.threads for i in thread.code if i.kind in ACCESSES}
    _declare("; ".join(f"{place} = 0" for place in sorted(used - set(program.generic))), program)
    return program
