"""``python tests/support/times.py REPORT``: where the time of a test session went, file by file.

REPORT is what pytest writes with ``--junit-xml``. A test's seconds are those of its worker: setup,
call and teardown, which includes waiting for processes that the test started.
"""

import sys
from collections import defaultdict
from xml.etree import ElementTree

MOST = 40  # files


def table(report: str) -> str:
    """One line per file, the slowest first; then the total and the wall clock."""
    [suite] = ElementTree.fromstring(report).iter("testsuite")
    files: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in suite.iter("testcase"):
        name = case.attrib["classname"].replace(".", "/")
        files[name].append((float(case.attrib["time"]), case.attrib["name"]))
    seconds = {name: sum(each for each, _ in cases) for name, cases in files.items()}
    lines = [" seconds  tests  file (its slowest test)"]
    for name in sorted(files, key=lambda name: -seconds[name])[:MOST]:
        longest, slowest = max(files[name])
        cases = len(files[name])
        lines.append(f"{seconds[name]:8.1f} {cases:6d}  {name} ({slowest} {longest:.1f})")
    wall = float(suite.attrib["time"])
    lines.append(f"{sum(seconds.values()):8.1f} seconds of all workers, {wall:.1f} by the clock")
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(table(file.read()))
