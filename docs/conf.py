"""Settings of the documentation site: sphinx-build -W -c docs . build/site

The source folder is the repository, so that pages link to each other, to README.md and to source
files by the paths that GitHub knows, too.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import ragen_jax  # noqa: E402

project = "ragen_jax"
author = "The ragen_jax authors"
version = release = ragen_jax.__version__
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "docs/**",
]
exclude_patterns = [
    "docs/README.md",
    "docs/site",
    # Introductions that benchmarks/*.py put into pages of docs/ (benchmarks/pages.py).
    "benchmarks/floors.md",
    "benchmarks/gym_tasks.md",
]
extensions = ["myst_nb"]

myst_heading_anchors = 4  # under GitHub's names
smartquotes = False  # values and commands are there to be copied
nb_execution_mode = "off"  # notebooks hold what they printed; tests/docs runs them

html_theme = "furo"
html_title = f"ragen_jax {version}"
html_extra_path = ["site/start"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
