"""``python csrc/model/check_ptx.py [NAME ...]``: the device protocols under PTX's memory model.

Of each program in ``ptx/protocols`` all executions that the model allows are searched. In each its
condition must hold, without a data race; in a broken variant there must be one in which it does
not, or with a race. The tests of ``ptx/classic.litmus`` must have the verdicts that stand there.
Otherwise the exit status is 1.

``--published FOLDER VERDICTS`` instead runs litmus tests of others: VERDICTS is a file of lines
``path of a test below FOLDER,0 or 1``, 1 where what the test says of its executions is true.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ptx.program import Program, Unsupported, parse
from ptx.search import executions, passes
from ptx.variants import variants

HERE = Path(__file__).resolve().parent / "ptx"


class Finding(NamedTuple):
    executions: int
    error: str  # Empty if the condition holds in all executions, and none has a race.
    trace: str  # Of the execution in which it does not.
    seconds: float


def search(program: Program) -> Finding:
    begin = time.perf_counter()
    count = 0
    for execution in executions(program):
        count += 1
        error = "wrong value" if not all(execution.outcomes()) else ""
        if not error and execution.causality.races():
            error = "data race"
        if error:
            return Finding(count, error, str(execution), time.perf_counter() - begin)
    error = "" if count else "no execution"
    return Finding(count, error, "", time.perf_counter() - begin)


def programs(name: str) -> list[tuple[str, Program, bool]]:
    """A protocol and its broken variants, with what is broken, and whether it must be found."""
    text = (HERE / "protocols" / f"{name}.litmus").read_text()
    broken = [(what, parse(variant), True) for what, variant in variants(text)]
    return [("", parse(text), False), *broken]


def check_protocols(names: list[str], traces: bool = False) -> bool:
    todo = [(name, *rest) for name in names for rest in programs(name)]
    passed = True
    print(f"{'protocol':15} {'broken':55} {'executions':>10} {'time':>8}  result")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(search, [program for _, _, program, _ in todo])
        for (name, what, _, is_broken), finding in zip(todo, found, strict=True):
            good = finding.error in ("wrong value", "data race") if is_broken else not finding.error
            passed = passed and good
            result = f"found: {finding.error}" if is_broken else "holds in all executions"
            if not good:
                result = "NOT FOUND" if is_broken else f"ERROR: {finding.error}"
            figures = f"{finding.executions:>10,} {finding.seconds:>6.1f} s"
            print(f"{name:15} {what:55} {figures}  {result}", flush=True)
            if traces or not (good or is_broken):
                print(finding.trace)
    return passed


def classic() -> list[Program]:
    tests = re.split(r"^(?=PTX )", (HERE / "classic.litmus").read_text(), flags=re.MULTILINE)
    return [parse(test) for test in tests[1:]]


def check_classic() -> bool:
    tests = classic()
    wrong = [test.name for test in tests if not passes(test)]
    verdicts = f"wrong verdicts: {', '.join(wrong)}" if wrong else "all verdicts are right"
    print(f"{len(tests)} classic tests: {verdicts}")
    return not wrong


def check_published(folder: Path, verdicts: Path) -> bool:
    count = {"agree": 0, "disagree": 0, "unsupported": 0}
    for line in filter(None, verdicts.read_text().split()):
        path, verdict = line.split(",")
        try:
            is_true = passes(parse((folder / path).read_text()))
            result = "agree" if is_true == (verdict == "1") else "disagree"
        except Unsupported as error:
            result = "unsupported"
            path += f": {error}"
        count[result] += 1
        if result != "agree":
            print(f"{result:12} {path}")
    print(", ".join(f"{number} {result}" for result, number in count.items()))
    return not count["disagree"]


def protocols() -> list[str]:
    return sorted(path.stem for path in (HERE / "protocols").glob("*.litmus"))


def check() -> bool:
    right = check_classic()
    return check_protocols(protocols()) and right


def main() -> int:
    names = protocols()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[1])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--traces", action="store_true", help="print what each found execution reads"
    )
    parser.add_argument("--published", nargs=2, type=Path, metavar=("FOLDER", "VERDICTS"))
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no protocol {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if arguments.published:
        return 0 if check_published(*arguments.published) else 1
    if arguments.names:
        return 0 if check_protocols(arguments.names, arguments.traces) else 1
    return 0 if check() else 1


if __name__ == "__main__":
    sys.exit(main())
