"""The main job as a person does it: the quickstart notebook in JupyterLab, with the panel and the sidebar."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Page, expect

from tests.ui.lab import LabServer, execute, faults, open_notebook, show_sidebar, wait_until_ran

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
NUM_STEPS = 15 * 23
RUN_S = 150


def place_of(text: str) -> int:
    """Return the number of the first code cell that holds a text."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    return next(place for place, cell in enumerate(cells) if cell.cell_type == "code" and text in cell.source)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_quickstart_trains_on_two_workers_and_gives_the_model_back(page: Page, lab: LabServer, pictures: Path):
    shutil.copy(NOTEBOOK, lab.root)
    open_notebook(page, lab, NOTEBOOK.name)
    show_sidebar(page)
    sidebar = page.locator(".accel-nb-sidebar-content")
    sidebar.get_by_role("button", name="Load accel_nb").click()
    expect(sidebar).to_have_attribute("data-state", "ready", timeout=RUN_S * 1000)

    execute(page, "notebook:run-all-cells")
    training, result = place_of("%%accelerate"), place_of("accuracy")
    wait_until_ran(page, training, RUN_S)
    panel = page.locator(".accel-nb-panel").first
    panel.scroll_into_view_if_needed()
    expect(panel).to_have_attribute("data-status", "done")
    expect(panel).to_have_attribute("data-points", str(2 * NUM_STEPS))
    expect(panel.locator("canvas")).to_have_count(4)
    page.screenshot(path=pictures / "quickstart-panel.png")
    assert faults(page, ".accel-nb-panel") == []

    wait_until_ran(page, result, RUN_S)
    accuracy = page.get_by_text("digits that the model has not seen").last
    accuracy.scroll_into_view_if_needed()
    assert float(accuracy.inner_text().split("accuracy: ")[1].split("%")[0]) > 90
    wait_until_ran(page, place_of("worker 1 has had enough"), RUN_S)
    expect(sidebar.get_by_text("rank 1")).to_be_visible()
    page.screenshot(path=pictures / "quickstart-result.png")
