"""``name_urls.py URL``: adds ``[project.urls]`` to pyproject.toml, for the repository at ``URL``.

The package does not know where it is hosted; the workflow that publishes wheels does.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGES = {
    "Homepage": "",
    "Source": "",
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}


def named(project: str, url: str) -> str:
    """The text of a pyproject.toml with the table.

    Raises:
        ValueError: it has one.
    """
    if "\n[project.urls]\n" in project:
        raise ValueError("pyproject.toml has [project.urls]; remove it, or do not run this")
    lines = [f'{name} = "{url.rstrip("/")}{path}"' for name, path in PAGES.items()]
    return "\n".join([project.rstrip(), "", "[project.urls]", *lines, ""])


if __name__ == "__main__":
    file = Path("pyproject.toml")
    file.write_text(named(file.read_text(), sys.argv[1]))
