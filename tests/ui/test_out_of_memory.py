"""A step that does not fit, as a person sees it: the bill in the cell's output, and the next cell trains."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

from tests.notebook.memory_cells import LIMIT, MODEL, NO_LIMIT, TRAIN
from tests.ui.lab import LabServer, execute, open_notebook, wait_until_ran

CELLS = (
    f"%load_ext accel_nb\n{MODEL.strip()}",
    f"%%accelerate --cpus 2\n{LIMIT}{TRAIN}",
    f"%%accelerate --cpus 2\n{NO_LIMIT}",
    f"%%accelerate --cpus 2 --accumulate 8\n"
    f"loader = DataLoader(loader.dataset, batch_size=1024)\n{TRAIN}print('trained')",
)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_step_that_does_not_fit_leaves_its_bill_and_a_pool_that_trains(page: Page, lab: LabServer, pictures: Path):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_code_cell(text.strip()) for text in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / "memory.ipynb")
    open_notebook(page, lab, "memory.ipynb")

    def run(cell: int) -> None:
        page.evaluate(
            "cell => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = cell; }",
            cell,
        )
        execute(page, "notebook:run-cell")
        wait_until_ran(page, cell, 120)

    run(0)
    run(1)
    output = page.locator(".jp-CodeCell .jp-OutputArea").nth(1)
    expect(output).to_contain_text("Memory of rank")
    expect(output).to_contain_text("were requested")
    expect(output).to_contain_text("--activation-checkpointing")
    output.evaluate("output => output.scrollIntoView({ block: 'end' })")
    page.screenshot(path=pictures / "out-of-memory.png")
    run(2)
    run(3)
    expect(page.locator(".jp-CodeCell .jp-OutputArea").nth(3)).to_contain_text("trained")
