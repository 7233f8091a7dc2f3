"""Make the screenshots of the documentation in a real JupyterLab: ``python -m tests.ui.screenshots [FOLDER]``.

Without a folder the pictures in ``docs/images`` are replaced. With one, the pictures of all states are written to it.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.ui.lab import (
    BROWSER_FLAGS,
    LabServer,
    execute,
    find_browser,
    open_notebook,
    show_sidebar,
    use_theme,
    wait_until_ran,
)

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
PUBLISHED = ("quickstart.png", "panel.png", "panel-running.png", "panel-gan.png", "panel-failed.png", "panel-dark.png")
NUM_COLORS = 256
RUN_S = 150

SETUP = """
%load_ext accel_nb
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features = torch.randn(2048, 32)
labels = (features @ torch.randn(32, 10)).argmax(1)
train_loader = DataLoader(TensorDataset(features[:1536], labels[:1536]), batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(features[1536:], labels[1536:]), batch_size=128)

def make_model():
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
"""

VALIDATION = """
%%accelerate --cpus 2 --name digits
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30 * len(train_loader))
for epoch in range(30):
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            loss = F.cross_entropy(model(x), y)
"""

GAN = """
%%accelerate --cpus 2 --name gan
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
discriminator = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
for epoch in range(12):
    for x, _ in train_loader:
        fake = generator(torch.randn(len(x), 8))
        d_loss = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
        d_loss.backward()
        d_optimizer.step()
        d_optimizer.zero_grad()
        g_loss = F.softplus(-discriminator(fake)).mean()
        g_loss.backward()
        g_optimizer.step()
        g_optimizer.zero_grad()
"""

FAILED = """
%%accelerate --cpus 2
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(train_loader):
    if step == 15 and accelerator.process_index == 1:
        y = y[:-1]  # a fault of one rank
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

ENDLESS = """
%%accelerate --cpus 2
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    for step, (x, y) in enumerate(train_loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    print("epoch", epoch, "loss", round(loss.item(), 3))
"""

EIGHT = """
%%accelerate --cpus 8
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

NAMES = ("setup", "validation", "gan", "failed", "endless", "background", "eight")
CELLS = (
    SETUP,
    VALIDATION,
    GAN,
    FAILED,
    ENDLESS,
    ENDLESS.replace("--cpus 2", "--cpus 2 --background"),
    EIGHT,
)


class Tour:
    """Takes the pictures, in one page."""

    def __init__(self, page: Page, server: LabServer, folder: Path) -> None:
        self._page = page
        self._server = server
        self._folder = folder

    def take_quickstart(self) -> None:
        """Run the quickstart notebook beside the sidebar."""
        shutil.copy(QUICKSTART, self._server.root)
        page = self._page
        page.set_viewport_size({"width": 1440, "height": 900})
        open_notebook(page, self._server, QUICKSTART.name)
        show_sidebar(page)
        sidebar = page.locator(".accel-nb-sidebar-content")
        sidebar.get_by_role("button", name="Load accel_nb").click()
        expect(sidebar).to_have_attribute("data-state", "ready", timeout=RUN_S * 1000)
        execute(page, "notebook:run-all-cells")
        panel = page.locator(".accel-nb-panel").first
        expect(panel).to_have_attribute("data-status", "done", timeout=RUN_S * 1000)
        cells = nbformat.read(QUICKSTART, as_version=4).cells
        code = [place for place, cell in enumerate(cells) if cell.cell_type == "code"]
        training = next(place for place in code if "%%accelerate" in cells[place].source)
        wait_until_ran(page, training, RUN_S)
        page.locator(".jp-CodeCell").filter(has=panel).evaluate("cell => cell.scrollIntoView({ block: 'start' })")
        self._save("quickstart.png", page.screenshot())
        wait_until_ran(page, code[-1], RUN_S)
        page.locator(".jp-CodeCell").last.evaluate("cell => cell.scrollIntoView({ block: 'end' })")
        self._save("quickstart-end.png", page.screenshot())

    def open_states(self) -> None:
        """Open the notebook of all other pictures."""
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        cells = [new_code_cell(text.strip()) for text in CELLS]
        nbformat.write(new_notebook(cells=cells, metadata=kernel), self._server.root / "states.ipynb")
        self._page.set_viewport_size({"width": 1440, "height": 1000})
        open_notebook(self._page, self._server, "states.ipynb")
        execute(self._page, "application:toggle-left-area")
        self._run("setup")

    def take_validation(self) -> None:
        """A run with a validation loop: while it runs, at its end, in the dark theme, narrow and wide."""
        page, panel = self._page, self._panel("validation")
        self._start("validation")
        expect(panel).to_have_attribute("data-status", "running", timeout=RUN_S * 1000)
        self._save("panel-running.png", self._shot(panel))
        expect(panel).to_have_attribute("data-status", "done", timeout=RUN_S * 1000)
        wait_until_ran(page, NAMES.index("validation"), RUN_S)
        self._save("panel.png", self._shot(panel))
        use_theme(page, "JupyterLab Dark")
        self._save("panel-dark.png", self._shot(panel))
        use_theme(page, "JupyterLab Light")
        for width in (900, 1900):
            page.set_viewport_size({"width": width, "height": 1000})
            self._save(f"panel-{width}.png", self._shot(panel))
        page.set_viewport_size({"width": 1440, "height": 1000})

    def take_gan(self) -> None:
        """A run with two losses."""
        self._run("gan")
        self._save("panel-gan.png", self._shot(self._panel("gan")))

    def take_failed(self) -> None:
        """An error of one rank, with its traceback."""
        self._run("failed")
        self._save("panel-failed.png", self._shot(self._panel("failed")))
        self._page.locator(".jp-CodeCell").nth(NAMES.index("failed")).evaluate(
            "cell => { cell.scrollIntoView({ block: 'end' }); }"
        )
        self._save("failed.png", self._page.screenshot())

    def take_interrupted(self) -> None:
        """A run that is interrupted by the user."""
        panel = self._panel("endless")
        self._start("endless")
        expect(panel).to_have_attribute("data-status", "running", timeout=RUN_S * 1000)
        expect(self._output("endless")).to_contain_text("epoch 1")
        self._save("panel-live.png", self._shot(self._output("endless")))
        execute(self._page, "notebook:interrupt-kernel")
        wait_until_ran(self._page, NAMES.index("endless"), RUN_S)
        self._save("panel-interrupted.png", self._shot(self._output("endless")))

    def take_background(self) -> None:
        """A background run, before and after a reload of the page."""
        self._run("background")
        panel = self._panel("background")
        expect(panel).to_have_attribute("data-status", "running", timeout=RUN_S * 1000)
        self._save("panel-background.png", self._shot(self._output("background")))
        execute(self._page, "docmanager:save")
        self._page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
        open_notebook(self._page, self._server, "states.ipynb")
        expect(panel).to_have_attribute("data-status", "running", timeout=RUN_S * 1000)
        expect(panel.locator(".accel-nb-printed")).to_contain_text("epoch")
        self._save("panel-reloaded.png", self._shot(self._output("background")))
        panel.get_by_role("button", name="interrupt").click()
        expect(panel).to_have_attribute("data-status", "interrupted", timeout=RUN_S * 1000)

    def take_eight(self) -> None:
        """A run on eight ranks."""
        self._run("eight")
        self._save("panel-eight.png", self._shot(self._panel("eight")))

    def _start(self, name: str) -> None:
        self._page.evaluate(
            "cell => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = cell; }", NAMES.index(name)
        )
        execute(self._page, "notebook:run-cell")

    def _run(self, name: str) -> None:
        self._start(name)
        wait_until_ran(self._page, NAMES.index(name), RUN_S)

    def _output(self, name: str) -> Locator:
        return self._page.locator(".jp-CodeCell .jp-Cell-outputArea").nth(NAMES.index(name))

    def _panel(self, name: str) -> Locator:
        return self._output(name).locator(".accel-nb-panel")

    def _shot(self, part: Locator) -> bytes:
        part.evaluate("part => part.scrollIntoView({ block: 'start' })")
        self._page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return part.screenshot()

    def _save(self, name: str, picture: bytes) -> None:
        """Write a picture with a palette, a third of the size."""
        image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        image.save(self._folder / name, optimize=True)


@contextmanager
def _page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, _page() as page:
        server = LabServer(Path(temporary))
        try:
            server.wait_until_up()
            tour = Tour(page, server, folder)
            tour.take_quickstart()
            tour.open_states()
            tour.take_validation()
            tour.take_gan()
            tour.take_failed()
            tour.take_interrupted()
            tour.take_background()
            tour.take_eight()
        finally:
            server.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as pictures:
            main(Path(pictures))
            for name in PUBLISHED:
                shutil.copy(Path(pictures) / name, ROOT / "docs" / "images")
