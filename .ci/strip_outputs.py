"""Take outputs, execution counts and widget state out of notebooks.

``python .ci/strip_outputs.py [--check] [FILE...]``; without files, all in ``notebooks/``. With ``--check`` nothing is
written, and the exit status is 1 if anything would be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"
KEPT_CELL_METADATA = {"tags"}


def strip(notebook: Any) -> Any:
    """Strip a notebook in place and return it."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name in KEPT_CELL_METADATA}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def stripped_text(path: Path) -> str:
    """Return the text that a notebook's file should have."""
    return nbformat.writes(strip(nbformat.read(path, as_version=4))) + "\n"


def main(words: list[str]) -> int:
    """Strip or check, and return the exit status."""
    is_check = "--check" in words
    paths = [Path(word) for word in words if word != "--check"] or sorted(FOLDER.glob("*.ipynb"))
    dirty = [path for path in paths if path.read_text(encoding="utf-8") != stripped_text(path)]
    for path in dirty:
        if not is_check:
            path.write_text(stripped_text(path), encoding="utf-8")
        print(f"{path}: {'holds outputs; run python .ci/strip_outputs.py' if is_check else 'stripped'}")
    return int(is_check and bool(dirty))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
