"""Sphinx: MyST pages, furo, and the API from the docstrings."""

from __future__ import annotations

import swapckpt

project = "swapckpt"
author = "The swapckpt authors"
release = version = swapckpt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"swapckpt {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"
# No intersphinx: the build needs no network, and a warning is an error.
