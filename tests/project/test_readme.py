"""The programs of README; tests/bench/test_bench.py checks its figures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run_program

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


# What a user pastes: files written by the shell; and what it shows that they print.
PROGRAMS = {
    name: (text, [line.removeprefix("# ") for line in printed.splitlines()])
    for name, text, printed in re.findall(
        r"^cat > (\w+\.py) <<'END'\n(.*?)^END\ntorchrun [^\n]*\n((?:# [^\n]*\n)+)```$",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
}
RANKS = 2


def test_the_number_of_families_is_that_of_their_page() -> None:
    (count,) = re.findall(r"\[(\d+) families\]\(docs/families.md\)", PAGE)
    assert f": {count} are sharded;" in (ROOT / "docs" / "families.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("file", ["ddp.py", "generate.py"])
def test_programs_print_what_is_shown(file: str, tmp_path: Path) -> None:
    text, shown = PROGRAMS[file]
    assert len([line for line in text.splitlines() if line]) <= 10
    path = tmp_path / file
    path.write_text(text)
    if file == "generate.py":
        pytest.importorskip("transformers")
        (setup,) = re.findall(r"^python -c '(.*)'$", PAGE, re.MULTILINE)
        subprocess.run([sys.executable, "-c", setup], cwd=tmp_path, check=True)
    lines = run_program(path, folder=tmp_path, ranks=RANKS).splitlines()
    printed = [line for line in lines if line.startswith(shown[0][:5])]
    if file == "generate.py":  # Of random weights; equal on all ranks.
        assert len(set(printed)) == len(set(shown)) == 1
        printed, shown = ([re.sub(r"\d+", "0", line) for line in each] for each in (printed, shown))
    assert printed == shown
