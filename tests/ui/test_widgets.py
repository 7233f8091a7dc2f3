"""Widgets that accelerated cells make and change, on the page."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

from tests.ui.lab import LabServer, execute, open_notebook, wait_for_kernel, wait_until_ran

NAME = "widgets.ipynb"
RUN_S = 150

MAKE = """
%load_ext accel_nb
import ipywidgets
from IPython.display import display
output, progress = ipywidgets.Output(), ipywidgets.IntProgress(max=3, description="done")
display(progress, output)
"""
CELL = """
%%accelerate --cpus 2 --no-panel
from tqdm.notebook import tqdm
label = ipywidgets.Label("nothing yet")
display(label)
for epoch in tqdm(range(3), desc="epochs"):
    progress.value += 1
    label.value = f"epoch {epoch}"
with output:
    print("in the output widget")
print("in the output of the cell")
"""
LATER = """
label.value += ", and the notebook's turn"
"""


def test_widgets_of_a_cell_are_live_on_the_page_and_come_back(page: Page, lab: LabServer, pictures: Path):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_code_cell(text.strip()) for text in (MAKE, CELL, LATER)]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / NAME)
    open_notebook(page, lab, NAME)
    execute(page, "notebook:run-all-cells")
    wait_until_ran(page, 2, RUN_S)
    first, second = page.locator(".jp-CodeCell").nth(0), page.locator(".jp-CodeCell").nth(1)
    expect(first.locator(".progress-bar").first).to_have_attribute("style", re.compile("width: 100%"))
    expect(second.get_by_text("epochs: 100%")).to_be_visible()
    expect(second.get_by_text("3/3")).to_be_visible()
    expect(second.get_by_text("epoch 2, and the notebook's turn")).to_be_visible()
    expect(first.locator(".widget-output")).to_contain_text("in the output widget")
    expect(second.locator(".jp-OutputArea-output", has_text="in the output of the cell")).to_be_visible()
    expect(second.locator(".jp-OutputArea-output", has_text="in the output widget")).to_have_count(0)
    page.screenshot(path=pictures / "widgets.png")

    execute(page, "docmanager:save")
    expect(page.locator(".jp-mod-dirty")).to_have_count(0)
    page.reload()
    wait_for_kernel(page)
    expect(second.get_by_text("epoch 2, and the notebook's turn")).to_be_visible()
    expect(second.get_by_text("3/3")).to_be_visible()
