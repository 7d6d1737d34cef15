"""All families of transformers, as docs/families.md lists them: see ``support.sweeps.families``."""

import pytest

pytest.importorskip("transformers")

from support.sweeps import families

PARTS = 16
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("part", range(PARTS))
def test_families_are_sharded_right_or_refused(part: int) -> None:
    found = [families.look_at(name) for name in families.names()[part::PARTS]]
    assert not [finding for finding in found if finding.state in ("differs", "fails")]
    if families.transformers.__version__ in families.PAGE.read_text():
        listed = families.PAGE.read_text()
        missing = [f for f in found if f.state == "equal" and f"{f.family} (" not in listed]
        assert not missing, "docs/families.md is not that of this program; run it"
