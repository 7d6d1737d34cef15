"""How Sphinx builds the site: ``make docs``, without a network."""

from __future__ import annotations

from typing import Any

from pipekernels import __version__

project = "pipekernels"
author = "the pipekernels authors"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# What the inventories list is linked; the build needs no network (inventories.py).
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
}

# Types in signatures that are not public names: users are given them, and need not name them.
nitpick_ignore_regex = [("py:class", r"Device|pipekernels\.\w+\.\w+\.\w+.*")]

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
