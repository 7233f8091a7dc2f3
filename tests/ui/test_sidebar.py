"""The sidebar in JupyterLab: it tells whether the kernel has the extension, and what that reports."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

from tests.ui.lab import LabServer, execute, open_notebook, show_sidebar, wait_until_ran

REGISTER = """
from accel_nb.ui.comm import DeviceLine, SidebarComm, SidebarState, WorkerLine

state = SidebarState(
    devices=[DeviceLine("<b>cpu</b>", "cpu", 16 * 2**30)],
    pool="ready",
    workers=[WorkerLine(0, "cpu", 101), WorkerLine(1, "cpu", 102)],
)
sidebar = SidebarComm(get_ipython(), lambda: state)
"""


def test_sidebar_follows_the_kernel(page: Page, lab: LabServer, pictures: Path):
    cells = [new_code_cell(REGISTER.strip()), new_code_cell("sidebar.close()")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / "sidebar.ipynb")
    open_notebook(page, lab, "sidebar.ipynb")
    show_sidebar(page)
    content = page.locator(".accel-nb-sidebar-content")
    expect(content).to_have_attribute("data-state", "not-loaded")
    expect(content.get_by_role("button", name="Load accel_nb")).to_be_visible()
    page.screenshot(path=pictures / "sidebar-not-loaded.png")

    execute(page, "notebook:run-cell-and-select-next")
    expect(content).to_have_attribute("data-state", "ready")
    expect(content.locator("[data-pool]")).to_have_text("ready")
    expect(content.get_by_text("<b>cpu</b>")).to_be_visible()
    expect(content.get_by_text("rank 1")).to_be_visible()
    content.get_by_text("Options of a run").click()
    expect(content.get_by_text("--precision")).to_be_visible()
    page.screenshot(path=pictures / "sidebar-ready.png")

    wait_until_ran(page, 0)
    execute(page, "notebook:run-cell-and-select-next")
    expect(content).to_have_attribute("data-state", "not-loaded")
