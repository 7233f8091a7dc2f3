"""What a browser sends while a cell runs reaches the kernel, as JupyterLab sends it: to a subshell."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from ipykernel import version_info as kernel_version

from tests.support.kernel import Kernel

WAIT_S = 30

CELL = f"""
import threading
from accel_nb.ui.panel import Panel
from accel_nb.telemetry.events import MetricLogged
asked, received = [], threading.Event()
panel = Panel("run", 1, display="widget", on_control=lambda action: (asked.append(action), received.set()))
panel.feed([MetricLogged(0, step, 0.1 * step, "loss", 1.0) for step in range(8)])
panel.refresh(force=True)  # the main shell has sent on the panel's comm
received.wait({WAIT_S})
print(asked, end="")
"""


class Browser:
    """Sends and receives messages as JupyterLab does."""

    def __init__(self, kernel: Kernel) -> None:
        self._client = kernel.client
        request = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(request)
        self._subshell = self._client.get_control_msg(timeout=WAIT_S)["content"]["subshell_id"]

    def run(self, code: str) -> str:
        return self._client.execute(code)

    def send(self, kind: str, content: dict[str, Any], *, beside: bool = True) -> str:
        message = self._client.session.msg(kind, content)
        message["header"]["subshell_id"] = self._subshell if beside else None
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def receive(self, kind: str, parent: str) -> dict[str, Any]:
        """Return the next message of a kind that a request has brought about."""
        while True:
            message = self._client.get_iopub_msg(timeout=WAIT_S)
            if (message["msg_type"], message["parent_header"].get("msg_id")) == (kind, parent):
                return message["content"]


@pytest.mark.skipif(kernel_version < (7, 0), reason="older kernels handle no message while a cell runs")
def test_panel_and_sidebar_are_answered_while_a_cell_runs(kernel: Kernel):
    browser, sidebar = Browser(kernel), uuid.uuid4().hex
    opened = browser.send(
        "comm_open", {"comm_id": sidebar, "target_name": "accel_nb.sidebar", "data": {}}, beside=False
    )
    assert browser.receive("comm_msg", opened)["data"]["kind"] == "state"

    cell = browser.run(CELL)
    panel = browser.receive("display_data", cell)["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    asked = browser.send("comm_msg", {"comm_id": sidebar, "data": {"kind": "refresh"}})
    assert browser.receive("comm_msg", asked)["data"]["kind"] == "state"
    control = {"kind": "control", "action": {"kind": "stop"}}
    browser.send("comm_msg", {"comm_id": panel, "data": {"method": "custom", "content": control}})
    assert browser.receive("stream", cell)["text"] == "[{'kind': 'stop'}]"


PLOT = f"""
%matplotlib inline
import threading, matplotlib.pyplot as plt
answered = threading.Event()
get_ipython().kernel.comm_manager.register_target("answered", lambda comm, message: answered.set())
figure, axes = plt.subplots()
print("plotting", flush=True)
answered.wait({WAIT_S})
axes.plot([1, 2])
print(plt.get_fignums(), end="")
"""


@pytest.mark.skipif(kernel_version < (7, 0), reason="older kernels handle no message while a cell runs")
def test_a_message_to_the_sidebar_does_not_show_the_figures_that_a_cell_is_drawing(kernel: Kernel):
    browser, sidebar = Browser(kernel), uuid.uuid4().hex
    opened = browser.send(
        "comm_open", {"comm_id": sidebar, "target_name": "accel_nb.sidebar", "data": {}}, beside=False
    )
    assert browser.receive("comm_msg", opened)["data"]["kind"] == "state"

    cell = browser.run(PLOT)
    assert browser.receive("stream", cell)["text"] == "plotting\n"
    asked = browser.send("comm_msg", {"comm_id": sidebar, "data": {"kind": "refresh"}})
    assert browser.receive("comm_msg", asked)["data"]["kind"] == "state"
    browser.send("comm_open", {"comm_id": uuid.uuid4().hex, "target_name": "answered", "data": {}})
    assert browser.receive("stream", cell)["text"] == "[1]"
