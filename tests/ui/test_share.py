"""A run that was saved as one HTML file, opened without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from accel_nb.telemetry.events import TimeUsed
from accel_nb.ui.panel import Panel
from accel_nb.ui.queries import QuerySources, ShareQuery
from tests.support.nightly import nightly
from tests.ui.lab import faults
from tests.ui.synthetic import training_events


def test_a_shared_run_is_one_file_with_chart_options_and_every_row(
    page: Page, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    from accel_nb.ui import panel as module

    monkeypatch.chdir(tmp_path)
    panel = Panel("digits </script>", 2, display="text")
    panel.state.describe = lambda: {"options": "--cpus 2", "code": "<b>train()</b>", "token": "hf_" + "a" * 34}
    panel.feed(list(training_events(3000)))
    panel.state.finish("done")
    (answer, _) = ShareQuery().answer(QuerySources(panel.state, (), module._save_html))
    text = (tmp_path / answer["file"]).read_text()
    assert "hf_aaaa" not in text
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url))
    errors: list[object] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto((tmp_path / answer["file"]).as_uri())
    shown = page.locator(".accel-nb-panel")
    expect(shown).to_have_attribute("data-status", "done")
    expect(shown.locator("canvas")).to_have_count(6)
    expect(page.get_by_text("<b>train()</b>")).to_be_visible()
    page.screenshot(path=pictures / "shared.png", full_page=True)
    with page.expect_download() as numbers:
        shown.get_by_role("button", name="CSV").click()
    assert Path(numbers.value.path()).read_text().count("\n") == 3001
    assert not errors
    assert all(url.startswith(("file:", "blob:")) for url in foreign), foreign


INSIDE = """captions => captions.filter(caption => {
  const first = caption.querySelector('.accel-nb-map-figure').getBoundingClientRect();
  const box = caption.getBoundingClientRect();
  const name = caption.querySelector('.accel-nb-map-name').getBoundingClientRect();
  return first.left < Math.max(box.left, name.right) - 0.5 || first.right > box.right + 0.5;
}).map(caption => caption.textContent)"""

FOCUSED = "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"


@pytest.mark.parametrize("scheme", [nightly("light"), "dark"])
def test_eight_ranks_are_readable_and_reached_by_the_keyboard(
    page: Page, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, scheme: Literal["light", "dark"]
):
    from accel_nb.ui import panel as module

    monkeypatch.chdir(tmp_path)
    panel = Panel("digits", 8, display="text")
    panel.feed(list(training_events(60, num_ranks=8)))
    for step in range(1, 11):
        panel.feed([TimeUsed(rank, step, 1.7e9 + step, 0.1, 0.2, 0.05 * (7 - rank), 0.0) for rank in range(8)])
    panel.state.finish("done")
    (answer, _) = ShareQuery().answer(QuerySources(panel.state, (), module._save_html))
    page.emulate_media(color_scheme=scheme)
    page.goto((tmp_path / answer["file"]).as_uri())
    shown = page.get_by_role("region", name="Training run digits")
    expect(shown.locator(".accel-nb-map-caption")).to_have_count(8)
    utilization = shown.locator(".accel-nb-utilization")
    expect(utilization.locator("canvas")).to_have_count(0)
    utilization.get_by_text("utilization").click()
    expect(utilization.locator("canvas")).to_have_count(1)
    for width in (700, 960, 1900):
        page.set_viewport_size({"width": width, "height": 1000})
        expect(shown).to_have_css("display", "block")
        shown.screenshot(path=pictures / f"eight-{scheme}-{width}.png")
        assert shown.locator(".accel-nb-map-caption").evaluate_all(INSIDE) == [], "a figure is cut"
        assert shown.evaluate("panel => panel.scrollWidth <= panel.clientWidth"), "wider than its column"
    assert faults(page, ".accel-nb-panel", ("minor", "moderate", "serious", "critical")) == []
    controls = ["What to draw", "Horizontal axis", "Smoothing", "log", "PNG", "CSV"]
    reached: list[str] = []
    while "CSV" not in reached and len(reached) < 40:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert [text for text in reached if text in controls] == controls
