"""What the panel leaves in a saved notebook, by real kernels."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.kernel import own_kernel

ROOT = Path(__file__).parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from accel_nb.ui.panel import Panel
from tests.ui.synthetic import training_events
"""

RUN = """
panel = Panel("digits", 2, mode={mode!r}, display={rung!r})
for event in training_events(60):
    panel.feed([event])
    panel.refresh()
panel.finish("done")
"""

LIVE, STATIC, TEXT, CORE = (("live", None), ("static", None), ("live", "text"), ("live", "core widget"))


@pytest.fixture(scope="module")
def notebook() -> Any:
    """Run one cell for each way to show a panel, and one that trains nothing."""
    cells = [new_code_cell(SETUP)]
    cells += [new_code_cell(RUN.format(mode=mode, rung=rung)) for mode, rung in (LIVE, STATIC, TEXT, CORE)]
    cells += [new_code_cell('panel = Panel("run", 2)\npanel.refresh(force=True)\npanel.finish("done")')]
    made = new_notebook(cells=cells)
    client = NotebookClient(made, timeout=60, kernel_name="python3", store_widget_state=True)
    client.km = client.create_kernel_manager()
    with own_kernel(client.km):
        client.execute()
    nbformat.validate(made)
    return made


def outputs(notebook: Any, cell: int) -> list[dict[str, Any]]:
    return [output.get("data", output) for output in notebook.cells[cell].outputs]


def test_a_live_panel_leaves_widget_picture_and_text(notebook: Any):
    (data,) = outputs(notebook, 1)
    assert set(data) == {WIDGET, "image/png", "text/plain"}
    assert data["text/plain"].startswith("60 steps, loss")
    assert data["text/plain"].endswith("2 workers")
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_a_live_panel_saves_its_final_state_for_notebooks_that_keep_widgets(notebook: Any):
    (data,) = outputs(notebook, 1)
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    saved = state[data[WIDGET]["model_id"]]
    assert saved["state"]["final"]["kind"] == "snapshot"
    assert saved["state"]["final"]["facts"]["status"] == "done"
    buffer = next(part for part in saved["buffers"] if part["path"] == ["snapshot"])
    rows = {(block["table"], block["rank"]): block["rows"] for block in saved["state"]["final"]["blocks"]}
    assert rows["step", 0] == 60
    width = {"step": 6, "metric": 2, "memory": 8}
    size = sum(block["rows"] * width[block["table"]] for block in saved["state"]["final"]["blocks"])
    assert len(base64.b64decode(buffer["data"])) == 8 * size


def test_a_static_panel_leaves_picture_and_text_only(notebook: Any):
    (data,) = outputs(notebook, 2)
    assert set(data) == {"image/png", "text/plain"}


def test_the_last_rung_leaves_a_line(notebook: Any):
    (data,) = outputs(notebook, 3)
    assert set(data) == {"text/plain"}


def test_a_panel_of_core_widgets_leaves_picture_and_text_only(notebook: Any):
    (data,) = outputs(notebook, 4)
    assert set(data) == {"image/png", "text/plain"}


def test_a_cell_that_trains_nothing_leaves_nothing(notebook: Any):
    assert outputs(notebook, 5) == []


def test_html_of_a_notebook_without_widget_state_shows_the_picture(notebook: Any):
    bare = nbformat.from_dict({**notebook, "metadata": {}})
    html, _ = HTMLExporter().from_notebook_node(bare)
    assert html.count('src="data:image/png;base64,') == 3
