"""The subjects of the last commits: a room as a tag, the imperative, at most 72 characters."""

import re
from pathlib import Path

import pytest
from support.programs import run

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
LAST = 20
ROOMS = (
    {path.name for path in (ROOT / "pipekernels").rglob("*") if path.is_dir()}
    | {path.name for path in ROOT.iterdir() if path.is_dir()}
    | {path.name for path in (ROOT / "csrc").rglob("*") if path.is_dir()}
    | {"cli", "distributed", "project", "torch"}
)
# Words that end like a past or present participle and are imperatives all the same.
IMPERATIVES = {"Bring", "Embed", "Feed", "Need", "Seed", "Shed", "Speed", "String"}
NOT_IMPERATIVE = re.compile(r"(?:A|An|The|This|It|\w+(?:ed|ing))$")


def subjects() -> list[str]:
    """Those of the last commits that are no merges, newest first; fewer in a shallow clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("a source distribution has no commits")
    command = ["git", "log", f"-{LAST}", "--no-merges", "--format=%s"]
    return run(*command, cwd=ROOT).stdout.splitlines()


def faults(subject: str) -> list[str]:
    match = re.fullmatch(r"\[([\w-]+)\] (\S+)(.*)", subject)
    if match is None:
        return ["no tag of a room: '[comm] Name ...'"]
    room, verb, _ = match.groups()
    checks = {
        f"{len(subject)} characters; the limit is 72": len(subject) > 72,
        f"{room!r} is not a room": room not in ROOMS,
        f"{verb!r} is not an imperative with a capital": not verb[0].isupper()
        or (verb not in IMPERATIVES and NOT_IMPERATIVE.match(verb) is not None),
        "a full stop at the end": subject.endswith("."),
    }
    return [text for text, wrong in checks.items() if wrong]


def test_the_last_commits_have_good_subjects() -> None:
    assert {subject: wrong for subject in subjects() if (wrong := faults(subject))} == {}
