"""How Sphinx builds the site: ``make docs``, without a network."""

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
