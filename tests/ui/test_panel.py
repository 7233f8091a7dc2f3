"""The live panel in JupyterLab: drawn while a cell runs, in both themes, back after a reload of the page."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

from tests.ui.lab import LabServer, execute, open_notebook, use_theme, wait_until_ran

ROOT = Path(__file__).parents[2]
NUM_STEPS = 600

FEED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from accel_nb.ui.panel import Panel
from tests.ui.synthetic import memory_snapshot, rate_plan, training_events

from accel_nb.ui.run_comparison import EarlierRuns

events = list(training_events({num_steps}))
earlier = EarlierRuns()

def run_before(title, num_steps):
    before = Panel(title, 2, display="text", earlier=earlier)
    before.feed(list(training_events(num_steps)))
    before.finish("done")

panel = Panel("digits", 2, earlier=earlier)

def feed(part):
    for start in range(0, len(part), 16):
        panel.feed(part[start : start + 16])
        panel.refresh()
        time.sleep(0.01)  # the run that these events pretend to come from
"""

RUN_ALL = 'feed(events)\npanel.finish("done")'
RUN_CORE = """
import threading
asked, pressed = [], threading.Event()
press = lambda action: (asked.append(action), pressed.set())
panel = Panel("<b>digits</b>", 2, display="core widget", on_control=press)
feed(events)
panel.refresh(force=True)
pressed.wait(60)
panel.finish("interrupted")
print(asked)
"""
RUN_COMPARED = f"""
run_before("baseline", 400)
run_before("<b>wide</b>", 900)
panel = Panel("digits", 2, earlier=earlier)
panel.feed([rate_plan({NUM_STEPS}), memory_snapshot(0, 60), memory_snapshot(1, 60)])
feed(events)
panel.finish("done")
"""
RUN_LONG = 'panel.feed(training_events(20_000))\npanel.finish("done")'


@pytest.fixture
def notebook(lab: LabServer, request: pytest.FixtureRequest) -> str:
    """Return the name of a notebook whose second cell is the test's parameter."""
    name = f"{request.node.originalname}.ipynb"
    first = FEED.format(root=str(ROOT), num_steps=NUM_STEPS).strip()
    cells = [new_code_cell(first), new_code_cell(request.param.strip())]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / name)
    return name


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", [RUN_COMPARED], indirect=True, ids=["compared"])
def test_panel_draws_a_run_in_both_themes(page: Page, lab: LabServer, notebook: str, pictures: Path):
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url) if "://127.0.0.1" not in request.url else None)
    open_notebook(page, lab, notebook)
    execute(page, "notebook:run-all-cells")
    panel = page.locator(".accel-nb-panel")
    expect(panel).to_have_attribute("data-status", re.compile("running|done"))
    expect(panel).to_have_attribute("data-status", "done", timeout=60_000)
    wait_until_ran(page, 1)  # the finished output takes the running one's place
    expect(panel).to_have_attribute("data-points", str(2 * NUM_STEPS))
    expect(panel.locator("canvas")).to_have_count(6)  # the loss, two memory charts, three small charts
    drawn = panel.locator(".accel-nb-section").first.get_attribute("data-points-drawn") or ""
    assert int(drawn) > 2 * NUM_STEPS, "two ranks and their mean"
    expect(panel.locator(".accel-nb-rank-flag", has_text="slow")).to_have_count(1)
    validation = panel.locator(".accel-nb-section").first.get_by_role("button", name="val/loss")
    expect(validation.locator(".accel-nb-swatch:not(.accel-nb-is-dashed)")).to_be_visible()
    panel.scroll_into_view_if_needed()
    panel.screenshot(path=pictures / "panel-light.png")
    use_theme(page, "JupyterLab Dark")
    panel.screenshot(path=pictures / "panel-dark.png")
    page.screenshot(path=pictures / "lab-dark.png")
    panel.get_by_role("button", name="log").click()
    panel.get_by_role("combobox", name="What to draw").select_option("learning rate")
    expect(panel.locator(".accel-nb-legend-title").first).to_have_text("learning rate")
    expect(panel.get_by_role("button", name="planned")).to_be_visible()
    expect(panel.locator(".accel-nb-block-drawing")).to_have_count(2)
    panel.get_by_role("button", name="log").click()
    panel.get_by_role("button", name="compare").click()
    for title in ("baseline", "<b>wide</b>"):
        panel.get_by_label(title).check()
        expect(panel.get_by_role("button", name=title)).to_be_visible()
    panel.screenshot(path=pictures / "compared-dark.png")
    use_theme(page, "JupyterLab Light")
    panel.get_by_role("combobox", name="What to draw").select_option("loss")
    panel.screenshot(path=pictures / "compared-light.png")
    with page.expect_download() as numbers:
        panel.get_by_role("button", name="CSV").click()
    assert Path(numbers.value.path()).read_text().startswith('step,loss,"loss, rank 0","loss, rank 1",learning rate,')
    with page.expect_download() as picture:
        panel.get_by_role("button", name="PNG").click()
    picture.value.save_as(pictures / "compared-saved.png")
    assert not [url for url in foreign if url.startswith("http")]


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", [RUN_ALL], indirect=True, ids=["all"])
def test_chart_is_read_zoomed_and_saved(page: Page, lab: LabServer, notebook: str, pictures: Path):
    open_notebook(page, lab, notebook)
    use_theme(page, "JupyterLab Dark")
    execute(page, "notebook:run-all-cells")
    panel = page.locator(".accel-nb-panel")
    expect(panel).to_have_attribute("data-status", "done", timeout=60_000)
    wait_until_ran(page, 1)
    ink = "element => getComputedStyle(element).color"
    swatch = "element => getComputedStyle(element).backgroundColor"
    assert panel.locator(".accel-nb-swatch").first.evaluate(swatch) == panel.evaluate(ink), "the mean is in the ink"
    chart = panel.locator(".accel-nb-section").first
    panel.get_by_role("combobox", name="Smoothing").select_option("raw")
    num_validation = NUM_STEPS // 50
    num_points = 3 * NUM_STEPS - 3 + num_validation  # a NaN in each line of the training loss is no point
    expect(chart).to_have_attribute("data-points-drawn", str(num_points))
    all_points = int(chart.get_attribute("data-points-drawn") or "")

    panel.get_by_role("combobox", name="Smoothing").select_option("smoother")
    panel.get_by_role("button", name="focus").click()
    panel.get_by_role("button", name="rank 1").click()
    expect(panel.get_by_role("button", name="rank 1")).to_have_attribute("aria-pressed", "false")
    panel.get_by_role("combobox", name="Horizontal axis").select_option("over samples")
    chart.locator(".accel-nb-plot").hover()
    expect(panel.locator(".accel-nb-legend-title").first).to_contain_text("loss at samples")
    panel.screenshot(path=pictures / "panel-smoothed.png")
    area = chart.locator(".u-over").bounding_box()
    assert area is not None
    page.mouse.move(area["x"] + area["width"] * (NUM_STEPS // 3 - 1) / (NUM_STEPS - 1), area["y"] + 40)
    expect(chart.locator(".accel-nb-marked")).to_have_text("loss not finite")
    panel.screenshot(path=pictures / "panel-mark.png")

    with page.expect_download() as numbers:
        panel.get_by_role("button", name="CSV").click()
    lines = Path(numbers.value.path()).read_text().splitlines()
    assert lines[0].startswith('step,loss,"loss, rank 0","loss, rank 1",learning rate,')
    assert len(lines) == 1 + NUM_STEPS
    with page.expect_download() as picture:
        panel.get_by_role("button", name="PNG").click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")
    assert picture.value.suggested_filename == "loss-digits.png"

    panel.get_by_role("combobox", name="Smoothing").select_option("raw")
    chart.locator(".accel-nb-plot").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    expect(chart).not_to_have_attribute("data-points-drawn", str(all_points))
    page.keyboard.press("0")
    expect(chart).to_have_attribute("data-points-drawn", str(all_points))


@pytest.mark.parametrize("notebook", [RUN_CORE], indirect=True, ids=["core"])
def test_core_widgets_draw_and_control_and_leave_a_picture(page: Page, lab: LabServer, notebook: str, pictures: Path):
    open_notebook(page, lab, notebook)
    execute(page, "notebook:run-all-cells")
    output = page.locator(".jp-CodeCell .jp-OutputArea").last
    expect(output.locator("img.widget-image")).to_be_visible(timeout=60_000)
    expect(output).to_contain_text("running <b>digits</b>: 600 steps")
    output.scroll_into_view_if_needed()
    for theme in ("Dark", "Light"):
        use_theme(page, f"JupyterLab {theme}")
        output.screenshot(path=pictures / f"panel-core-{theme.lower()}.png")
    output.get_by_role("button", name="pause").click()
    output.get_by_role("button", name="resume drawing").click()
    output.get_by_role("button", name="stop after step").click()
    wait_until_ran(page, 1)
    expect(output.get_by_role("button")).to_have_count(0)
    expect(output.locator("img")).to_have_count(1)
    expect(output).to_contain_text("{'kind': 'stop'}")


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", [RUN_LONG], indirect=True, ids=["long"])
def test_looking_closer_brings_every_step(page: Page, lab: LabServer, notebook: str, pictures: Path):
    open_notebook(page, lab, notebook)
    execute(page, "notebook:run-all-cells")
    panel = page.locator(".accel-nb-panel")
    expect(panel).to_have_attribute("data-status", "done", timeout=60_000)
    wait_until_ran(page, 1)
    sent = int(panel.get_attribute("data-points") or "")
    assert sent < 2 * 20_000, "a long run comes as its extremes"
    panel.screenshot(path=pictures / "panel-long.png")
    panel.locator(".accel-nb-section").first.locator(".accel-nb-plot").focus()
    for _ in range(4):
        page.keyboard.press("+")
    # A sixteenth of 20,000 steps, 1,250 on each of the two ranks, of which the extremes were there.
    page.wait_for_function(
        "sent => Number(document.querySelector('.accel-nb-panel').dataset.points) > sent + 2 * 1000", arg=sent
    )


@pytest.mark.nightly
@pytest.mark.parametrize("notebook", [RUN_ALL], indirect=True, ids=["all"])
def test_panel_and_its_picture_survive_saving_and_a_reload(page: Page, lab: LabServer, notebook: str):
    open_notebook(page, lab, notebook)
    execute(page, "notebook:run-all-cells")
    panel = page.locator(".accel-nb-panel")
    expect(panel).to_have_attribute("data-status", "done", timeout=60_000)
    wait_until_ran(page, 1)
    expect(panel).to_have_attribute("data-status", "done")
    execute(page, "docmanager:save")
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.context.model.dirty === false")
    (output,) = nbformat.read(lab.root / notebook, as_version=4).cells[1].outputs
    assert set(output["data"]) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    open_notebook(page, lab, notebook)
    expect(panel).to_have_attribute("data-points", str(2 * NUM_STEPS))
    expect(panel.locator("canvas")).to_have_count(6)
    page.evaluate("() => { void window.jupyterapp.shell.currentWidget.sessionContext.restartKernel(); }")
    page.on("dialog", lambda dialog: dialog.accept())
    open_notebook(page, lab, notebook)  # the kernel has no panel any more
    expect(page.locator("img.accel-nb-saved-picture")).to_have_attribute("alt", re.compile("^600 steps"))
    expect(panel).to_have_count(0)


TRAIN = """
%load_ext accel_nb
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.rand(4096, 1)), batch_size=8)

def train():
    import time
    for epoch in range(10**9):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)  # a step of a larger model; nothing waits for it
"""


@pytest.mark.timeout(300)
def test_a_run_is_controlled_from_its_panel_and_attached_to_after_a_reload(
    page: Page, lab: LabServer, pictures: Path, tmp_path: Path
):
    name = "run_control.ipynb"
    cells = [
        TRAIN,
        f"%%accelerate --cpus 2 --background --checkpoint {tmp_path}\ntrain()",
        "%accelerate attach",
        "%%accelerate --cpus 2\ntrain()\nprint('never')",
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    made = new_notebook(cells=[new_code_cell(cell.strip()) for cell in cells], metadata=kernel)
    nbformat.write(made, lab.root / name)

    def run_cell(place: int) -> None:
        page.evaluate("place => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = place; }", place)
        execute(page, "notebook:run-cell")

    open_notebook(page, lab, name)
    run_cell(0)
    wait_until_ran(page, 0)
    run_cell(1)
    panel = page.locator(".accel-nb-panel").first
    said = panel.locator(".accel-nb-action-result")
    panel.get_by_role("button", name="÷ 2").click()
    expect(said).to_contain_text("learning rate 0.1 -> 0.05, after step")
    panel.get_by_label("New learning rate").fill("0.02")
    page.keyboard.press("Enter")
    expect(said).to_contain_text("learning rate 0.05 -> 0.02, after step")
    panel.get_by_role("button", name="checkpoint now").click()
    expect(said).to_contain_text("is being saved")
    panel.scroll_into_view_if_needed()
    panel.screenshot(path=pictures / "run_control-light.png")

    page.on("dialog", lambda dialog: dialog.accept())  # leave the page, whatever is not saved
    open_notebook(page, lab, name)  # the page is another one, the run goes on
    run_cell(2)
    wait_until_ran(page, 2)
    attached = page.locator(".accel-nb-panel").last
    use_theme(page, "JupyterLab Dark")
    attached.get_by_label("How often steps are reported").select_option("10")
    expect(attached.locator(".accel-nb-action-result")).to_contain_text("every 10 steps are reported")
    attached.screenshot(path=pictures / "run_control-dark.png")
    attached.get_by_role("button", name="stop after step").press("Enter")
    expect(attached).to_have_attribute("data-status", "done")
    expect(attached.get_by_role("button", name="interrupt")).to_be_hidden()

    run_cell(3)  # in the foreground: the kernel is busy, and listens beside the cell
    panel = page.locator(".accel-nb-panel").last
    expect(panel).to_have_attribute("data-status", "running", timeout=30_000)
    expect(panel.get_by_role("button", name="checkpoint now")).to_be_disabled()
    panel.get_by_role("button", name="stop after step").click()
    wait_until_ran(page, 3)
    expect(page.get_by_text("as requested: the rest of the cell did not run").last).to_be_visible()
    expect(page.get_by_text("never", exact=True)).to_have_count(0)
