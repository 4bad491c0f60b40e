"""The book: `make docs`, or `sphinx-build -W docs build/docs/html` with requirements/docs.txt installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "docs/_ext"), str(ROOT / "benchmarks")]

import attnops  # noqa: E402

project = "attnops"
author = "The attnops authors"
copyright = "the attnops authors"
version = release = attnops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "attnops_pictures",
    "attnops_reference",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "attnops"
html_static_path = ["_static"]
html_css_files = ["attnops.css"]
html_js_files = ["attnops.js"]
html_show_sourcelink = False
highlight_language = "none"  # of fences that name none: commands
pygments_style = "tango"
pygments_dark_style = "monokai"

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

# A name in single backticks is code, as in the rest of the project.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types of arguments are in the text, with shapes
autodoc_mock_imports = ["triton", "flashinfer", "vllm", "sglang", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_param = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
