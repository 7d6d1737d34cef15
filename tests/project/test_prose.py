"""Phrases that read like a translation do not come back, in pages, comments and messages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
# Phrases by what to write instead; each stands for its like.
FORBIDDEN = {
    r"(?<!here )\b(?:is|are|was|were) no (?!longer\b|more\b)(?!time\b)": "is not a ...",
    r"\bof (?:one's|his|her) own\b|\bof ours\b|\bof yours\b": "a custom ...; your ...",
    r"\bof (?:its|their) own\b(?! \w)": "its own ...",
    r"\balike\b|\b[Ll]ikewise\b": "the same; equal; in the same way",
    r"(?<!\w)too[.;]$|, too[.,;:)]": "also; as well",
    r"\bas ever\b|\bdeals? out\b|\bdealt (?:out|evenly)\b": "unchanged; divides",
    r"\bhas hung up\b|\bby way of\b|\blosses like wins\b": "closed; over; as well as",
    r"\bis everybody's\b|\bunkind\b|\bbut for (?!all)": "of all ranks; except for",
    r"^\s*(?:#|//|\"\"\")\s*Of (?!course)": "a sentence, not a fragment",
    r"\bis denied\b|\bdo(?:es)? not come to\b": "is not supported; does not join",
}
GENERATED = re.compile(r"<!-- bench:.*?<!-- /bench -->", re.DOTALL)  # From old result files.
NAMED = ("an error of its own", "memory of its own")  # Good English where they stand.


def files() -> Iterator[Path]:
    """All text that people read, except CHANGELOG.md's past, generated pages and tests."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"))
    yield from (page for page in (ROOT / "docs").rglob("*.md") if page.stem != "families")
    for room in ("pipekernels", "csrc", "bench", "demo", "examples"):
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".sh"):
                yield path


def faults(text: str) -> list[str]:
    found = []
    text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        for phrase in NAMED:
            line = line.replace(phrase, "")
        for pattern, instead in FORBIDDEN.items():
            if re.search(pattern, line):
                found.append(f"line {number}: {line.strip()} (write: {instead})")
    return found


def test_pages_comments_and_messages_have_none_of_the_phrases() -> None:
    paths = list(files())
    assert len(paths) > 300
    found = {
        str(path.relative_to(ROOT)): wrong for path in paths if (wrong := faults(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "a model that is no `nn.Sequential`",
        "for loops of one's own",
        "a thread of its own, which",
        "Likewise the ranks",
        "seed the ranks alike",
        "works on CUDA, too.",
        "works as ever",
        "deals out the layers",
        "# Of the full weight.",
        "is no longer a fault, but is no list",
    ],
)
def test_a_phrase_is_found(line: str) -> None:
    assert faults(line)


def test_good_english_is_not() -> None:
    assert faults("There is no mesh; it is no longer used, has its own stream, and too many.") == []
