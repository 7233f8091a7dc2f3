"""Execution of the project's notebooks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.kernel import own_kernel

FOLDER = Path(__file__).parents[2] / "notebooks"


STATUS = "%accelerate status"


@dataclass
class Executed:
    """A notebook after its run; the kernel has been shut down."""

    notebook: Any

    def cell(self, ident: str) -> Any:
        return next(cell for cell in self.notebook.cells if cell.id == ident)

    def text(self, ident: str) -> str:
        return "".join(output.get("text", "") for output in self.cell(ident).outputs)

    def facts(self) -> dict[str, Any]:
        return json.loads(self.text("facts"))

    def displays(self, ident: str) -> list[dict[str, Any]]:
        return [output.data for output in self.cell(ident).outputs if output.output_type == "display_data"]

    def errors(self) -> dict[str, list[str]]:
        found = {
            cell.id: [output.ename for output in cell.outputs if output.output_type == "error"]
            for cell in self.notebook.cells
            if cell.cell_type == "code"
        }
        return {ident: names for ident, names in found.items() if names}

    def pids(self) -> list[int]:
        return [int(number) for number in re.findall(r"process (\d+)", self.text("processes"))]


def execute(name: str, facts: str, *, has_workers: bool = True) -> Executed:
    """Run a notebook and two more cells: one prints ``facts``, an expression, as JSON, the other names processes."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    more = {"facts": f"import json\nprint(json.dumps({facts}))"} | ({"processes": STATUS} if has_workers else {})
    for ident, source in more.items():
        notebook.cells.append(nbformat.v4.new_code_cell(source, id=ident))
    client = NotebookClient(
        notebook, timeout=1200, store_widget_state=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.km = client.create_kernel_manager()
    with own_kernel(client.km):
        client.execute()
    return Executed(notebook)
