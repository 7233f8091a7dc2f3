"""A run that was saved as one HTML file, opened without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from accel_nb.ui.panel import Panel
from accel_nb.ui.queries import QuerySources, ShareQuery
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
