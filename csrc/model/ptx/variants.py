"""The ways to break a protocol that its text lists, each as a separate program.

After an instruction, ``! drop`` leaves it out (a barrier, for all threads of the CTA),
``! relaxed`` and so on give it another order, ``! gpu`` and so on another scope, and
``! st.weak x, 1`` puts another instruction in its place. A line ``! x1 -> x0`` replaces a name
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ptx.program import ORDERS, SCOPES

_BREAK = re.compile(r"!(?!=)([^!#\n]*)")


def variants(text: str) -> Iterator[tuple[str, str]]:
    """What is broken, and the text of the broken program."""
    lines = text.splitlines()
    thread = cta = ""
    headers = [line for line in lines if re.match(r"P\d+@", line)]
    for number, line in enumerate(lines):
        instruction = re.split(r"[!#]", line)[0].strip()
        if re.match(r"P\d+@", line):
            thread, _, cta = instruction.partition("@")
        for change in (found.strip() for found in _BREAK.findall(line)):
            if "->" in change:
                old, new = (name.strip() for name in change.split("->"))
                yield f"{old} is {new}", re.sub(rf"\b{old}\b", new, text)
                continue
            broken = list(lines)
            if change == "drop" and instruction.startswith("bar."):
                _drop_barrier(broken, instruction, cta)
                where = ", ".join(h.split("@")[0] for h in headers if cta in h)
            else:
                broken[number] = "" if change == "drop" else _changed(instruction, change)
                where = thread
            yield f"{where}: {instruction}: {change}", "\n".join(broken)


def _drop_barrier(lines: list[str], instruction: str, cta: str) -> None:
    inside = False
    for number, line in enumerate(lines):
        if re.match(r"P\d+@", line):
            inside = re.split(r"[!#]", line)[0].strip().endswith(f"@{cta}")
        if inside and re.split(r"[!#]", line)[0].strip() == instruction:
            lines[number] = ""


def _changed(instruction: str, change: str) -> str:
    if "." in change:
        return change
    head, _, tail = instruction.partition(" ")
    parts = head.split(".")
    if change in SCOPES:
        parts = [change if part in SCOPES else part for part in parts]
    elif change in ORDERS:
        parts = [change if part in ORDERS else part for part in parts]
        parts = [part for part in parts if part not in SCOPES or change != "weak"]
    else:
        raise ValueError(f"{change!r} is neither an order, a scope, nor an instruction")
    return f"{'.'.join(parts)} {tail}"
