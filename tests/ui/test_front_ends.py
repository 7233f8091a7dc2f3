"""A cell that trains, in Jupyter Notebook 7 and in the classic notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

from tests.ui.lab import LabServer, execute, wait_for_kernel

NAME = "training.ipynb"
NUM_STEPS = 40
RUN_MS = 150_000

BUILD = """
%load_ext accel_nb
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=8)
"""
TRAIN = """
%%accelerate --cpus 2
for epoch in range(4):
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
"""
STOP = "%unload_ext accel_nb"

_CLASSIC_IS_READY = """() => {
  const kernel = window.Jupyter?.notebook?.kernel;
  if (!kernel?.is_connected() || !kernel.widget_manager) { return false; }
  // The widget manager draws outputs anew after it has read the kernel's widgets: the kernel answers in order.
  if (window.accelNbAnswered === undefined) {
    window.accelNbAnswered = false;
    kernel.comm_info(undefined, () => { window.accelNbAnswered = true; });
  }
  return window.accelNbAnswered;
}"""


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LabServer]:
    """Return a server of the application that is the test's parameter, with a notebook that trains."""
    server = LabServer(tmp_path, request.param)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_code_cell(text.strip()) for text in (BUILD, TRAIN, STOP)]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), server.root / NAME)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


def check_panel(page: Page, picture: Path) -> None:
    """Check that the panel of the cell has drawn each step of two workers and keeps them."""
    panel = page.locator(".accel-nb-panel")
    expect(panel).to_have_attribute("data-status", "done", timeout=RUN_MS)
    expect(panel).to_have_attribute("data-points", str(2 * NUM_STEPS))
    panel.scroll_into_view_if_needed()
    page.screenshot(path=picture)
    expect(page.get_by_text("trained", exact=True)).to_have_count(1)
    with page.expect_download() as numbers:
        panel.get_by_role("button", name="CSV").click()
    assert len(Path(numbers.value.path()).read_text().splitlines()) == NUM_STEPS + 1


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["notebook"], indirect=True)
def test_notebook_7_shows_panel_and_sidebar(page: Page, server: LabServer, pictures: Path):
    page.goto(server.page_url(f"notebooks/{NAME}?"))
    wait_for_kernel(page)
    execute(page, "notebook:run-all-cells")
    check_panel(page, pictures / "notebook-7.png")
    page.evaluate("() => { window.jupyterapp.shell.activateById('accel-nb-sidebar'); }")
    sidebar = page.locator(".accel-nb-sidebar-content")
    expect(sidebar).to_be_visible()
    expect(sidebar).to_have_attribute("data-state", re.compile("ready|not-loaded"))


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["nbclassic"], indirect=True)
def test_the_classic_notebook_shows_the_panel(page: Page, server: LabServer, pictures: Path):
    page.goto(server.page_url(f"nbclassic/notebooks/{NAME}?"))
    page.wait_for_function(_CLASSIC_IS_READY, timeout=90_000)
    page.evaluate("() => { Jupyter.notebook.execute_all_cells(); }")
    check_panel(page, pictures / "notebook-classic.png")
