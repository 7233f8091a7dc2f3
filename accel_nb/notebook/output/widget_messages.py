"""Messages of the workers' widgets.

A widget that a cell makes on a worker has a counterpart in the kernel, which the front end shows. A widget of the
notebook that a cell uses has a counterpart on the workers, whose changes are applied to the notebook's.
"""

from __future__ import annotations

import base64
import copy
import importlib
import sys
from contextlib import suppress
from typing import Any

from IPython.core.getipython import get_ipython

from accel_nb.pool.sync.reductions.widgets import WIDGET_TARGET, find_widget
from accel_nb.ui.comm import comm_class

TOPICS = ("comm_open", "comm_msg", "comm_close")


def apply_message(topic: str, body: dict[str, Any]) -> None:
    """Apply a message of a rank's comm; without a front end do nothing. Print errors of the user's observers."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return
    try:
        _apply(topic, body, kernel)
    except Exception as error:  # of the user's observers of the notebook's widget
        print(f"a change of a widget raised {type(error).__name__}: {error}", file=sys.stderr)


def _apply(topic: str, body: dict[str, Any], kernel: Any) -> None:
    buffers = [base64.b64decode(text) for text in body["buffers"]]
    if topic == "comm_open":
        _open(kernel, body, buffers)
        return
    widget, comm = find_widget(body["comm_id"]), kernel.comm_manager.comms.get(body["comm_id"])
    if topic == "comm_close" and comm is not None:
        (comm if widget is None else widget).close()
    elif topic == "comm_msg" and widget is not None:
        _update(widget, body["data"], buffers, kernel)
    elif topic == "comm_msg" and comm is not None:
        comm.send(body["data"], body["metadata"], buffers)


def _open(kernel: Any, body: dict[str, Any], buffers: list[bytes]) -> None:
    """Open a comm to the front end; for a widget whose class can be imported, make the kernel's counterpart.

    The counterpart is made first: the front end ignores messages that it sends before, such as a state without
    children.
    """
    data, metadata = body["data"], body["metadata"]
    make = comm_class(kernel.comm_manager)
    comm = make(target_name=body["target_name"], comm_id=body["comm_id"], primary=False)
    message = {"metadata": metadata, "content": {"data": data}, "buffers": buffers}
    try:
        if body["target_name"] == WIDGET_TARGET:
            # No ipywidgets, a class of a package that is not imported here, or one that needs arguments: only the front
            # end has the widget then.
            with suppress(ImportError, KeyError, TypeError):
                importlib.import_module("ipywidgets").Widget.handle_comm_opened(comm, copy.deepcopy(message))
    finally:
        comm.open(data, metadata, buffers)


def _update(widget: Any, data: dict[str, Any], buffers: list[bytes], kernel: Any) -> None:
    """Apply a change of the worker's counterpart; the widget sends it to the front end."""
    if data.get("method") == "custom":
        widget.send(data["content"], buffers)
    if data.get("method") != "update":
        return
    state = _with_buffers(data, buffers)
    # On a worker ``with output_widget:`` sets `msg_id`, so that the front end captures the output of that message. The
    # front end has only the message that runs this cell, so its id is set.
    if state.get("msg_id"):
        state["msg_id"] = kernel.get_parent()["header"]["msg_id"]
    with widget.hold_sync():
        for name, value in state.items():
            if name in widget.keys:
                widget.set_trait(name, widget.trait_metadata(name, "from_json", _unchanged)(value, widget))


def _unchanged(value: Any, widget: Any) -> Any:
    return value


def _with_buffers(data: dict[str, Any], buffers: list[bytes]) -> dict[str, Any]:
    """Return the state of a message with its buffers at their paths."""
    state = data["state"]
    for path, buffer in zip(data.get("buffer_paths", ()), buffers, strict=True):
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = buffer
    return state
