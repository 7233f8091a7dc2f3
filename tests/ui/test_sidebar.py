"""The sidebar in JupyterLab: its form is the cell's line, its actions reach the workers, it follows the notebook."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, Page, expect

from accel_nb.config import parse_flags, resolve
from tests.ui.lab import LabServer, execute, faults, open_notebook, show_sidebar, use_theme, wait_until_ran

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
"""

LONG = """
import os, time
print("<b>worker</b> speaks")
for number in range(5000):
    print("line", number, flush=True)
while True:
    time.sleep(0.05)
"""

FORGED = """
from comm import create_comm
forged = create_comm(target_name="accel_nb.sidebar", data={
    "kind": "state", "version": 3, "pool": {"state": "<img src=x onerror='window.accelNbForged=1'>", "workers": [
        {"rank": "<b>", "device": "<script>window.accelNbForged=1</script>", "pid": "<b>"}]},
    "devices": [{"name": "<img src=x onerror='window.accelNbForged=1'>", "kind": [], "total_bytes": -1}], "notes": 7})
"""


def write(lab: LabServer, name: str, *cells: str, **metadata: Any) -> str:
    notebook = new_notebook(cells=[new_code_cell(cell.strip()) for cell in cells], metadata=KERNEL | metadata)
    nbformat.write(notebook, lab.root / name)
    return name


def source_of(page: Page, cell: int) -> str:
    script = "cell => window.jupyterapp.shell.currentWidget.content.widgets[cell].model.sharedModel.getSource()"
    return page.evaluate(script, cell)


def wait_for_source(page: Page, cell: int, beginning: str) -> None:
    script = """([cell, beginning]) => window.jupyterapp.shell.currentWidget.content.widgets[cell]
        .model.sharedModel.getSource().startsWith(beginning)"""
    page.wait_for_function(script, arg=[cell, beginning])


def activate(page: Page, cell: int) -> None:
    page.evaluate("cell => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = cell; }", cell)


def field(content: Locator, option: str) -> Locator:
    return content.locator(f"[data-option='{option}']")


@pytest.fixture
def content(page: Page) -> Locator:
    return page.locator(".accel-nb-sidebar-content")


def record(lab: LabServer, name: str, outcome: Any, *, started: float, line: str = "") -> None:
    """Record a run that has ended, with a falling loss."""
    recording = lab.registry.begin(
        "launch", "train.py", resolve([parse_flags(line)]), name=name, args=("--data", "digits"), started=started
    )
    noise = random.Random(name)
    recording.log((step, {"loss": 0.1 + 2 * 0.97**step * noise.uniform(0.8, 1.2)}) for step in range(1, 200))
    recording.finish(outcome, num_steps=200, error="ValueError: <b>no</b>" if outcome == "failed" else None)


@pytest.mark.timeout(300)
def test_form_makes_the_cell_that_runs_and_stops(page: Page, lab: LabServer, content: Locator, pictures: Path):
    settings = {"accel_nb": {"options": {"seed": "7"}, "other": "kept"}}
    shutil.rmtree(lab.registry.folder, ignore_errors=True)  # the runs of tests before, if there were any
    for day, outcome in enumerate(("done", "failed", "interrupted")):
        record(lab, f"run {day}", outcome, started=1.7e9 + 86_400 * day)
    open_notebook(page, lab, write(lab, "form.ipynb", MODEL, LONG, **settings))
    show_sidebar(page)
    expect(content).to_have_attribute("data-state", "not-loaded")
    page.screenshot(path=pictures / "sidebar-not-loaded.png")
    content.get_by_role("button", name="Load accel_nb").click()
    expect(content).to_have_attribute("data-state", "ready", timeout=60_000)
    execute(page, "notebook:run-cell-and-select-next")
    wait_until_ran(page, 0)
    expect(field(content, "seed").locator(".accel-nb-origin")).to_have_text("notebook")

    # The form is a line to come, then the cell's own.
    activate(page, 1)
    field(content, "cpus").get_by_role("textbox").fill("2")
    expect(content.locator("[data-line]")).to_have_text("%%accelerate --cpus 2")
    expect(content.get_by_text("2 workers: cpu")).to_be_visible()
    find = content.get_by_label("Find an option")
    find.fill("newest complete")
    expect(field(content, "checkpoint.resume").get_by_text("checkpoint.resume", exact=True)).to_be_visible()
    find.fill("zzzz")
    expect(content.get_by_text("No option has this")).to_be_visible()
    find.fill("")
    content.get_by_role("button", name="Insert into cell").click()
    wait_for_source(page, 1, "%%accelerate --cpus 2\nimport os")
    field(content, "precision").get_by_role("combobox").select_option("no")
    wait_for_source(page, 1, "%%accelerate --cpus 2 --precision no\n")
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(1).click()
    page.keyboard.press("Control+Home")
    page.keyboard.press("End")
    page.keyboard.type(" --clip 0.5 --precison x")
    expect(field(content, "clip").get_by_role("textbox")).to_have_value("0.5")
    expect(content.get_by_role("alert").first).to_contain_text("did you mean --precision")
    field(content, "clip").get_by_role("textbox").fill("-1")
    expect(field(content, "clip").get_by_role("alert")).to_contain_text("is not allowed")
    field(content, "clip").get_by_role("alert").scroll_into_view_if_needed()
    page.screenshot(path=pictures / "sidebar-problems.png")
    assert "--precison x" in source_of(page, 1), "what is not understood stays"
    script = """text => { const { sharedModel } = window.jupyterapp.shell.currentWidget.content.widgets[1].model;
        sharedModel.setSource(text); }"""
    page.evaluate(script, "%%accelerate --cpus 2\n" + LONG.strip())
    expect(field(content, "clip").get_by_role("textbox")).to_have_value("")

    # What the notebook carries.
    content.get_by_role("button", name="Notebook", exact=True).click()
    expect(field(content, "seed").get_by_role("textbox")).to_have_value("7")
    field(content, "accumulate").get_by_role("textbox").fill("3")
    content.get_by_role("button", name="Cell", exact=True).click()
    expect(field(content, "accumulate").locator(".accel-nb-origin")).to_have_text("notebook")
    metadata = page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.getMetadata('accel_nb')")
    assert metadata == {"options": {"seed": "7", "accumulate": "3"}, "other": "kept"}

    # Runs of this machine: those that were there, and one that ends meanwhile.
    runs = content.locator("[data-run]")
    expect(runs).to_have_count(3)
    assert [run.get_attribute("data-outcome") for run in runs.all()] == ["interrupted", "failed", "done"]
    record(lab, "<i>newest</i>", "done", started=time.time(), line="--cpus 3 --clip 0.5")
    expect(runs.first).to_contain_text("<i>newest</i>")
    expect(runs.first.get_by_role("img", name="loss over 200 steps")).to_be_visible()
    runs.nth(2).get_by_role("button").first.click()
    expect(runs.nth(2).get_by_role("alert")).to_have_text("ValueError: <b>no</b>")
    runs.first.get_by_role("button").first.click()
    expect(runs.first).to_contain_text("clip = 0.5")
    runs.first.get_by_role("button", name="Put into the cell").click()
    wait_for_source(page, 1, "%%accelerate --cpus 3 --clip 0.5\nimport os")

    # A user's own words about a run, and where runs differ.
    runs.first.get_by_label("name").fill("wide <i>net</i>")
    runs.first.get_by_label("tags").fill("wide, lr 0.1")
    runs.first.get_by_label("notes").fill("the best so far")
    runs.first.get_by_role("button", name="Star: keep this run").click()
    expect(runs.first.locator(".accel-nb-tag")).to_have_text(["wide", "lr 0.1"])
    expect(runs.first.get_by_role("button", name="Star: keep this run")).to_have_attribute("aria-pressed", "true")
    expect(runs.first).to_contain_text("wide <i>net</i>")
    runs.first.get_by_label("tags").fill("x" * 60)
    runs.first.get_by_label("name").click()
    expect(content.get_by_text("a tag is a text of 1 to 50 characters")).to_be_visible()
    runs.first.get_by_label("tags").fill("wide")
    runs.first.get_by_label("name").click()
    expect(runs.first.locator(".accel-nb-tag")).to_have_text(["wide"])
    runs.first.get_by_role("button", name="Select to compare").click()
    runs.nth(1).get_by_role("button").first.click()
    runs.nth(1).get_by_role("button", name="Select to compare").click()
    compared = content.locator(".accel-nb-comparison")
    expect(compared.get_by_role("row", name="clip")).to_contain_text("0.5")
    content.get_by_label("Filter the runs").fill("wide")
    expect(runs).to_have_count(1)
    content.get_by_label("Filter the runs").fill("")
    content.get_by_role("button", name="Only runs with a star").click()
    expect(runs).to_have_count(1)
    content.get_by_role("button", name="Only runs with a star").click()
    content.get_by_label("Order of the runs").select_option("name")
    expect(runs).to_have_count(4)
    runs.last.get_by_role("button").first.click()
    for theme in ("Dark", "Light"):
        use_theme(page, f"JupyterLab {theme}")
        content.get_by_role("heading", name="Recent runs").scroll_into_view_if_needed()
        page.screenshot(path=pictures / f"sidebar-runs-{theme.lower()}.png")
        assert faults(page, ".accel-nb-runs") == []
    page.evaluate(script, "%%accelerate --cpus 2\n" + LONG.strip())

    content.get_by_role("button", name="Forecast").click()
    expect(content.locator("[data-plan]").first).to_contain_text("fits", timeout=60_000)
    content.get_by_role("heading", name="Memory forecast").scroll_into_view_if_needed()
    page.screenshot(path=pictures / "sidebar-forecast.png")

    execute(page, "notebook:run-cell")
    expect(content.locator("[data-pool]")).to_have_attribute("data-pool", "busy", timeout=60_000)
    expect(content.get_by_text("rank 1")).to_be_visible()
    expect(content.locator(".accel-nb-running")).to_contain_text("no step yet")
    content.get_by_role("group", name="Log of rank").get_by_role("button", name="1").click()
    log = content.get_by_role("log")
    expect(log).to_have_attribute("data-lines", "5001")
    expect(log.get_by_text("line 4999")).to_be_visible()
    log.evaluate("log => { log.scrollTop = 0; }")
    expect(log.get_by_text("<b>worker</b> speaks")).to_be_visible()
    assert log.locator(".accel-nb-log-line").count() < 60, "only what is in sight is drawn"
    expect(page.locator(".accel-nb-status-item")).to_contain_text("2 workers")
    for theme in ("Light", "Dark"):
        use_theme(page, f"JupyterLab {theme}")
        content.get_by_role("heading", name="Devices").scroll_into_view_if_needed()
        page.screenshot(path=pictures / f"sidebar-{theme.lower()}.png")
        assert faults(page, ".accel-nb-sidebar") == []
        assert faults(page, ".accel-nb-status-item") == []
    log.scroll_into_view_if_needed()
    page.screenshot(path=pictures / "sidebar-log-dark.png")

    content.get_by_role("button", name="Stop").click()
    wait_until_ran(page, 1)
    expect(content.locator("[data-pool]")).to_have_attribute("data-pool", "not started", timeout=60_000)
    expect(page.get_by_text("KeyboardInterrupt").first).to_be_attached()


def test_sidebar_follows_kernel_and_notebook(page: Page, lab: LabServer, content: Locator):
    write(lab, "other.ipynb", "x = 1")
    name = write(
        lab, "first.ipynb", "%load_ext accel_nb\n%accelerate config", FORGED, accel_nb={"options": {"seed": "7"}}
    )
    open_notebook(page, lab, name)
    show_sidebar(page)
    expect(content).to_have_attribute("data-state", "not-loaded")
    execute(page, "notebook:run-cell-and-select-next")
    expect(content).to_have_attribute("data-state", "ready")  # the kernel has called

    execute(page, "docmanager:open", {"path": "other.ipynb"})
    expect(content).to_have_attribute("data-state", "not-loaded")
    execute(page, "docmanager:open", {"path": "first.ipynb"})
    expect(content).to_have_attribute("data-state", "ready")
    expect(field(content, "seed").locator(".accel-nb-origin")).to_have_text("notebook")

    execute(page, "notebook:run-cell")
    expect(content.get_by_text("<img src=x").first).to_be_visible()
    assert page.evaluate("() => window.accelNbForged") is None

    page.evaluate("() => { void window.jupyterapp.shell.currentWidget.sessionContext.restartKernel(); }")
    expect(content).to_have_attribute("data-state", "not-loaded")
