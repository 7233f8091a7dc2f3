"""Platforms built around a real kernel: its variables, modules, names and home folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Kernel, running_kernel
from tests.support.nightly import nightly

WHERE = """
import sys
from accel_nb.runtime.process.platforms import detect_platform
from accel_nb.ui.fallback import find_display_facts, choose_display
"""
COLAB = (
    "import types\ngoogle = types.ModuleType('google')\nsys.modules['google.colab'] = types.ModuleType('google.colab')"
)

SETUP = """
%load_ext accel_nb
import os, torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.rand(64, 1)), batch_size=4)
"""
LOOP = """%%accelerate --cpus 2 --background --name '<b>x'
import time
for epoch in range(10**9):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)  # a step of a larger model; nothing waits for it
"""
WAIT_S = 60


pytestmark = pytest.mark.usefixtures("kernel")  # the first kernel of a process leaves an event loop in it


@pytest.mark.parametrize(
    ("variables", "code", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "r"}, "", "kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, COLAB, "colab"),
        ({}, COLAB, "colab"),
        nightly({"DEEPNOTE_PROJECT_ID": "1"}, "", "deepnote"),
        nightly({"PAPERSPACE_NOTEBOOK_REPO_ID": "1"}, "", "paperspace"),
        ({"HOME": "/home/studio-lab-user"}, "", "studiolab"),
        nightly({"SAGEMAKER_INTERNAL_IMAGE_URI": "1"}, "", "sagemaker"),
        nightly({"DATABRICKS_RUNTIME_VERSION": "16"}, "", "databricks"),
        nightly({"VSCODE_PID": "1"}, "", "vscode"),
        ({}, "__vsc_ipynb_file__ = 'x.ipynb'", "vscode"),
        ({}, "", "jupyter"),
    ],
)
def test_a_kernel_detects_its_platform(
    variables: dict[str, str], code: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for variable, value in ({"IPYTHONDIR": str(tmp_path)} | variables).items():
        monkeypatch.setenv(variable, value)
    if "HOME" in variables:
        monkeypatch.setenv("JUPYTER_DATA_DIR", os.fspath(tmp_path))
    with running_kernel() as kernel:
        assert kernel.run(WHERE + code).error is None
        assert kernel.value("detect_platform().name") == name
        rung = kernel.value("choose_display(find_display_facts(), 'live')")
        rungs = {"kaggle": "core widget", "deepnote": "picture", "studiolab": "picture", "databricks": "picture"}
        assert rung == rungs.get(name, "widget")
        assert kernel.value("'torch' in sys.modules") is False


class CoreWidgets:
    """A front end that renders what ipywidgets brings, and nothing else."""

    def __init__(self, kernel: Kernel) -> None:
        self.client = kernel.client
        self.states: dict[str, dict[str, Any]] = {}
        self.shown: dict[str, dict[str, Any]] = {}

    def follow(self, until: Callable[[], object]) -> None:
        """Take what the kernel sends until a condition holds."""
        while not until():
            message = self.client.get_iopub_msg(timeout=WAIT_S)
            content = message["content"]
            if message["msg_type"] == "comm_open" and content["target_name"] == "jupyter.widget":
                self.states[content["comm_id"]] = self._state(message)
                assert self.states[content["comm_id"]]["_model_module"].startswith("@jupyter-widgets/")
            elif message["msg_type"] == "comm_msg" and content["comm_id"] in self.states:
                self.states[content["comm_id"]] |= self._state(message)
            elif message["msg_type"] == "comm_close":
                self.states.pop(content["comm_id"], None)
            elif message["msg_type"] in ("display_data", "update_display_data"):
                self.shown[content["transient"].get("display_id", "")] = content["data"]

    def of(self, model: str) -> list[dict[str, Any]]:
        return [state for state in self.states.values() if state["_model_name"] == model]

    def click(self, label: str) -> None:
        """Press a button."""
        name = next(name for name, state in self.states.items() if state.get("description") == label)
        data = {"method": "custom", "content": {"event": "click"}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", {"comm_id": name, "data": data}))

    def _state(self, message: dict[str, Any]) -> dict[str, Any]:
        data = message["content"]["data"]
        values = {path[0]: bytes(part) for path, part in zip(data["buffer_paths"], message["buffers"], strict=True)}
        return {**data.get("state", {}), **values}


@pytest.mark.nightly
def test_kaggles_panel_is_made_of_core_widgets_and_controls_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    with running_kernel() as kernel:
        assert kernel.run(SETUP).error is None
        read = "import os\nfound = os.environ.get('NCCL_P2P_DISABLE')"
        assert kernel.run(f"%%accelerate --cpus 2\n{read}").error is None
        assert kernel.value("(found, os.environ.get('NCCL_P2P_DISABLE'))") == ("1", None)
        front = CoreWidgets(kernel)
        kernel.client.execute(LOOP)

        def line() -> str:
            return next((state["value"] for state in front.of("HTMLModel") if "running" in state["value"]), "")

        front.follow(lambda: line() and front.of("HBoxModel"))
        labels = [state["description"] for state in front.of("ButtonModel")]
        assert sorted(labels) == ["checkpoint now", "interrupt", "pause", "stop after step"]
        assert next(b for b in front.of("ButtonModel") if b["description"] == "checkpoint now")["disabled"]
        front.follow(lambda: front.of("ImageModel")[0].get("value", b"").startswith(b"\x89PNG"))
        before = line()
        front.follow(lambda: line() != before)  # the figures are live
        assert "&lt;b&gt;x: " in line()
        assert "<b>x" not in line()

        front.click("pause")
        front.follow(lambda: any(state["description"] == "resume drawing" for state in front.of("ButtonModel")))
        front.click("stop after step")
        front.follow(lambda: not front.of("ImageModel"))
        panel = next(data for data in front.shown.values() if "image/png" in data)
        assert set(panel) == {"image/png", "text/plain"}
        assert "2 workers" in panel["text/plain"]
        assert "done" in kernel.run("%accelerate wait").stdout
