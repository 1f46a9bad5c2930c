"""Write the quick start as a notebook, from its page.

python docs/make_notebook.py
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


PAGE = Path(__file__).parent / "quickstart.md"
NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
# What can only be run in a clone's own shell stays on the page.
BEGIN = "## The same in Python"


def notebook() -> nbformat.NotebookNode:
    """The page from `BEGIN` on: a code cell for each Python block, the text between as it is."""
    text = PAGE.read_text()
    text = "# Quick start\n\n" + text[text.index(BEGIN) + len(BEGIN) :].strip()
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)):
        if part.strip():
            make = new_code_cell if number % 2 else new_markdown_cell
            cells.append(make(part.strip(), id=f"cell-{len(cells)}"))
    return new_notebook(cells=cells)


if __name__ == "__main__":
    nbformat.write(notebook(), NOTEBOOK)
