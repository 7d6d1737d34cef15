"""How Sphinx builds the site: ``make docs``, without a network."""

from __future__ import annotations

from typing import Any

from pipekernels import __version__

project = "pipekernels"
author = "the pipekernels authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # The docstrings name types, with shapes and dtypes.

# Pages of other projects are not looked up: the build needs no network.
nitpick_ignore_regex = [("py:.*", r"torch\..*")]

html_theme = "furo"
html_title = f"pipekernels {release}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", without_private_constructors)


def without_private_constructors(
    app: Any, what: str, name: str, *_: Any
) -> tuple[str, None] | None:
    """Classes that users do not make by calling them are shown without arguments."""
    made_otherwise = ("pipekernels.Communicator", "pipekernels.Timeline")
    return ("", None) if what == "class" and name in made_otherwise else None
