"""``accel-nb export NOTEBOOK.ipynb SCRIPT.py``: converts a notebook to a script that trains in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from accel_nb.cli.parser import CommandParser
from accel_nb.config import environment_layer
from accel_nb.launch.target import read_bytes, read_notebook, stored_options
from accel_nb.notebook.export.script import NotebookCell, export_notebook, write_script
from accel_nb.runtime.process.environment import option_variables


def run(words: Sequence[str]) -> str:
    """Write the script and its options, and report what was written and left out. Raise ConfigError on errors."""
    parser = CommandParser(
        prog="accel-nb export", description="Convert a notebook to a script and a file of its options."
    )
    parser.add_argument("notebook", metavar="NOTEBOOK.ipynb")
    parser.add_argument("script", metavar="SCRIPT.py")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    options = parser.parse_args(words)
    notebook = read_notebook(read_bytes(options.notebook), options.notebook)
    sources = [
        NotebookCell(number, cell.cell_type, cell.source, frozenset(cell.metadata.get("tags", ())))
        for number, cell in enumerate(notebook.cells, 1)
    ]
    stored = stored_options(notebook, options.notebook)
    layers = [environment_layer(option_variables()), *([] if stored is None else [stored])]
    exported = export_notebook(sources, layers, title=options.notebook, script=options.script)
    return write_script(exported, options.script, replaces=options.force)
