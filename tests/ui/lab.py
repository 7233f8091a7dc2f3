"""A Jupyter server of its own in a temporary folder, and the steps of a person in JupyterLab."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from playwright.sync_api import Page

from accel_nb.runs import RunRegistry

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
START_S = 90
KERNEL_S = 90

# Flags with which neither the browser nor a page looks for the network; no GPU, no sandbox (tests may run as root).
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]

_HAS_KERNEL = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  const kernel = panel?.sessionContext?.session?.kernel;
  if (!kernel || !panel.sessionContext.isReady) { return false; }
  if (window.accelNbKernel !== kernel) {
    window.accelNbKernel = kernel;
    window.accelNbInfo = false;
    kernel.info.then(() => { window.accelNbInfo = true; });
  }
  return window.accelNbInfo && kernel.connectionStatus === 'connected';
}"""

_HAS_RUN = """cell => {
  const { content } = window.jupyterapp.shell.currentWidget;
  return typeof content.widgets[cell].model.executionCount === 'number';
}"""


def find_browser() -> str | None:
    """Return the Chromium to drive: the one that ``CHROMIUM_PATH`` names, else the system's."""
    return os.environ.get("CHROMIUM_PATH") or shutil.which("chromium") or shutil.which("chromium-browser")


Application = Literal["jupyterlab", "notebook", "nbclassic"]

_FLAGS: dict[Application, list[str]] = {
    "jupyterlab": ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"],
    "notebook": ["--JupyterNotebookApp.expose_app_in_browser=True"],
    "nbclassic": [],
}


class LabServer:
    """One server on loopback with a random token; its settings, kernels and caches lie under ``folder``."""

    def __init__(self, folder: Path, application: Application = "jupyterlab") -> None:
        self.root = folder / "notebooks"
        self.root.mkdir()
        self._folder = folder
        self._runtime = TemporaryDirectory(prefix="lab-")  # the path of a Unix socket has a limit of 107 characters
        self._token = secrets.token_hex(16)
        self._port = _free_port()
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                application,
                "--no-browser",
                "--allow-root",
                "--ip=127.0.0.1",
                f"--port={self._port}",
                "--ServerApp.port_retries=0",
                f"--IdentityProvider.token={self._token}",
                f"--ServerApp.root_dir={self.root}",
                "--KernelManager.transport=ipc",  # another test may bind a port before the kernel does
                *_FLAGS[application],
            ],
            env=self._environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def url(self, notebook: str) -> str:
        """Return the address of a notebook in a workspace of its own."""
        return self.page_url(f"lab/workspaces/{Path(notebook).stem}/tree/{notebook}?reset&")

    def page_url(self, path: str) -> str:
        """Return the address of a page, whose path ends in ``?`` or ``&``."""
        return f"http://127.0.0.1:{self._port}/{path}token={self._token}"

    def wait_until_up(self) -> None:
        """Return when the server answers; raises with its log when it does not."""
        if not wait_for(
            lambda: self._process.poll() is not None or self._request("GET", "/api/status") == 200, START_S
        ):
            raise TimeoutError(f"the server did not answer within {START_S} s:\n{self.log()}")
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended at once:\n{self.log()}")

    @property
    def registry(self) -> RunRegistry:
        """Return the registry that its kernels see."""
        return RunRegistry(self._folder / "state" / "accel_nb" / "runs")

    def log(self) -> str:
        """Return the end of the server's log."""
        return (self._folder / "server.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """Ask the server to end its kernels and itself."""
        if self._process.poll() is None:
            self._request("POST", "/api/shutdown")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._runtime.cleanup()

    def _request(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request(method, path, headers={"Authorization": f"token {self._token}"})
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def _environment(self) -> dict[str, str]:
        folders = {
            "HOME": "home",
            "IPYTHONDIR": "ipython",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "XDG_STATE_HOME": "state",
        }
        for name in folders.values():
            (self._folder / name).mkdir()
        quiet = self._folder / "settings" / "@jupyterlab" / "apputils-extension"
        quiet.mkdir(parents=True)
        news = {"fetchNews": "false", "checkForUpdates": False}
        (quiet / "notification.jupyterlab-settings").write_text(json.dumps(news))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JUPYTER", "JPY_")) or name == "JUPYTER_PATH"  # where other builds lie
        }
        own = {name: str(self._folder / folder) for name, folder in folders.items()}
        return inherited | own | {"JUPYTER_RUNTIME_DIR": self._runtime.name}


def open_notebook(page: Page, server: LabServer, notebook: str) -> None:
    """Open a notebook, in the light theme, and wait until its kernel really answers.

    "idle" alone is shown before there is a kernel. The theme is a setting of the server: a test before may have set it.
    """
    page.goto(server.url(notebook))
    wait_for_kernel(page)
    use_theme(page, "JupyterLab Light")


def wait_for_kernel(page: Page) -> None:
    """Return when the kernel of the notebook that is shown has answered."""
    page.wait_for_function(_HAS_KERNEL, timeout=KERNEL_S * 1000)


def execute(page: Page, command: str, args: dict[str, object] | None = None) -> None:
    """Start a command; never wait for it inside of the page, where there is no time limit."""
    page.evaluate(
        "([command, args]) => { void window.jupyterapp.commands.execute(command, args); }", [command, args or {}]
    )


def show_sidebar(page: Page) -> None:
    """Open the right-hand panel."""
    page.evaluate("() => { window.jupyterapp.shell.activateById('accel-nb-sidebar'); }")


def wait_until_ran(page: Page, cell: int, deadline_s: float = 60) -> None:
    """Return when a cell has its number: all that it had to show has arrived.

    The kernel's own status does not show it: it is "idle" after every comm message during a running cell.
    """
    page.wait_for_function(_HAS_RUN, arg=cell, timeout=deadline_s * 1000)


def use_theme(page: Page, theme: str) -> None:
    """Switch to "JupyterLab Light" or "JupyterLab Dark" and wait until the page has."""
    execute(page, "apputils:change-theme", {"theme": theme})
    page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")
    page.wait_for_selector("#jupyterlab-splash", state="detached")


def faults(page: Page, part: str, impacts: Collection[str] = ("serious", "critical")) -> list[str]:
    """Return what axe finds in a part of the page that has one of the impacts."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("part => axe.run(part, {resultTypes: ['violations']})", part)
    return [
        f"{fault['id']}: {fault['help']}: {json.dumps([node['target'] for node in fault['nodes']][:5])}"
        for fault in found["violations"]
        if fault["impact"] in impacts
    ]


def wait_for(condition: Callable[[], object], deadline_s: float) -> bool:
    """Look again and again until a condition holds or the deadline passes; returns whether it holds."""
    event, deadline = threading.Event(), time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        event.wait(0.1)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
