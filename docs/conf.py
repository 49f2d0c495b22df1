"""The site that `make docs` builds with Sphinx: README and the pages as they are. A link without an end fails."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "lmcache-cartridge"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [".*", "benchmarks", "build", "configs", "lmcache_cartridge", "tests"]
myst_heading_anchors = 4
nitpicky = True
smartquotes = False
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Give the site its list of pages."""
    app.connect("source-read", list_pages)


def list_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Put a list of the pages, in the order in which README's last section names them, behind its text."""
    if name == root_doc:
        pages = re.findall(r"\]\((\S+\.md)\)", source[0].partition("## Read on")[2])
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "CHANGELOG", "```", ""])
