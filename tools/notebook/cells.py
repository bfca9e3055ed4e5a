"""A script in the percent format becomes a notebook, by Jupytext.

Two tags say where a cell is alive, by Jupytext's names. ``tags=["active-py"]`` is for
the script alone. ``tags=["active-ipynb"]`` is for the notebook alone: in the script,
the lines of such a cell are comments.
"""

from __future__ import annotations

import jupytext
import nbformat
from nbformat import NotebookNode


def cells_of(script: str) -> list[NotebookNode]:
    """The cells that the notebook of ``script`` has."""
    # What stands before the first marker, such as an owner's comment, is no cell.
    begin = script.find("# %%")
    found = jupytext.reads(script[max(begin, 0) :], fmt="py:percent").cells
    return [c for c in found if "active-py" not in c.metadata.get("tags", [])]


def notebook_of(script: str) -> str:
    """The notebook of ``script``, without any output, as the text of an .ipynb file."""
    make = {
        "code": nbformat.v4.new_code_cell,
        "markdown": nbformat.v4.new_markdown_cell,
    }
    cells = [
        # Equal scripts make equal notebooks, so the ids are no random ones.
        make[cell.cell_type](cell.source, id=f"cell-{number:02}")
        for number, cell in enumerate(cells_of(script), 1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"
