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
BEGIN = "**The images**"
INTRODUCTION = """# Quick start

Two minutes on two CPU cores, without the Hub. In the folder of the clone, make the environment, get the demo's
backbone, and open this notebook with that environment:

```bash
make .venv/demo
.venv/bin/python examples/dinov2_small.py .cache/dinov2-small
.venv/bin/pip install notebook
.venv/bin/jupyter notebook examples/quickstart.ipynb
```
"""
TO_THE_CLONE = """import os
from pathlib import Path

# Notebooks run in their own folder; the paths below are in the folder of the clone.
if Path.cwd().name == "examples":
    os.chdir("..")"""


def notebook() -> nbformat.NotebookNode:
    """The page from `BEGIN` on: a code cell for each Python block, and the text between, with its links."""
    text = PAGE.read_text()
    text = re.sub(r"\]\((\w+\.md)", r"](../docs/\1", text[text.index(BEGIN) :])
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    cells = []
    for number, part in enumerate([INTRODUCTION, TO_THE_CLONE, *parts]):
        if part.strip():
            make = new_code_cell if number % 2 else new_markdown_cell
            cells.append(make(part.strip(), id=f"cell-{len(cells)}"))
    return new_notebook(cells=cells)


if __name__ == "__main__":
    nbformat.write(notebook(), NOTEBOOK)
