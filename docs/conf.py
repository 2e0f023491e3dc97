"""The site of the READMEs, by Sphinx: make site.

docs/pages.py collects the READMEs in a folder, and adds a page for each script with its source.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import pages

project = "GPU training"
language = "en"
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
highlight_language = "none"  # of code blocks that do not name one
nitpicky = True
smartquotes = False  # "--" in the text is a flag

myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["attrs_inline", "strikethrough", "tasklist"]

html_search_language = "zh"  # jieba splits Chinese texts into words; English words are stemmed, too
html_theme = "furo"
html_title = "GPU training"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"


def setup(app) -> None:
    pages.setup(app)
