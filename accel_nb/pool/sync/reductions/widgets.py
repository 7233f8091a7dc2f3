"""Widgets of the front end: each process has a widget object for a widget model, found by the model's id.

A worker's widget sends its changes as comm messages; the notebook's widget is sent, as its state, with a cell.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

from accel_nb.runtime.container_items import items_of

WIDGET_TARGET = "jupyter.widget"
"""The comm target name of ipywidgets."""
_PACKAGE = "ipywidgets"


def is_widget(value: Any) -> bool:
    """Return whether a value is a widget, whose state is in the front end too."""
    widgets = sys.modules.get(_PACKAGE)
    return widgets is not None and isinstance(value, widgets.Widget)


def find_widget(model_id: str) -> Any:
    """Return this process's widget with a model id, or None."""
    widgets = sys.modules.get(_PACKAGE)
    if widgets is None:
        return None
    found = widgets.widget_serialization["from_json"](f"IPY_MODEL_{model_id}", None)
    return found if is_widget(found) else None


def comm_function() -> tuple[Any, str]:
    """Return the module and the name of the function, or class, by which the installed ipywidgets opens comms."""
    if int(importlib.metadata.version(_PACKAGE).partition(".")[0]) >= 8:
        return importlib.import_module("comm"), "create_comm"
    return importlib.import_module("ipykernel.comm"), "Comm"


def reduce_widget(widget: Any, *, is_returned: bool) -> Any:
    """Reduce a widget to its model id, and for the workers to its class, its state and the widgets in it.

    Raise TypeError for a class of the notebook, whose objects may have more than their state, and for a closed widget.
    """
    kind = type(widget)
    if kind.__module__ == "__main__" or widget.comm is None:
        what = "closed" if widget.comm is None else "of a class defined in the notebook, which cannot be sent"
        raise TypeError(f"it is, or holds, a widget of the notebook's page ({kind.__name__}) that is {what}")
    state = _plain(widget.get_state())
    if is_returned:  # the notebook's has this state already: here it only makes a change of the worker's detected
        return _find, (widget.model_id, state)
    values = {key: getattr(widget, key) for key in widget.keys}
    parts = {key: value for key, value in values.items() if is_widget(value)}
    listed = [part for value in values.values() for part in _widgets_in(value)]
    return _make, (kind, widget.model_id, state, parts, listed)


def _find(model_id: str, state: dict[str, Any]) -> Any:
    found = find_widget(model_id)
    if found is None:
        raise LookupError(f"the notebook has no widget with the model id {model_id}")
    return found


def _make(kind: Any, model_id: str, state: dict[str, Any], parts: dict[str, Any], listed: list[Any]) -> Any:
    """Return this process's widget with a model id, in a state that refers to ``parts`` and the ``listed`` widgets."""
    widget = find_widget(model_id)
    if widget is not None:
        widget.set_state(state)
        return widget
    comm = getattr(*comm_function())(target_name=WIDGET_TARGET, comm_id=model_id, primary=False)
    with comm.paused():  # the constructor arguments must send no message to the front end
        widget = kind(comm=comm, **parts)
        widget.set_state(state)
    return widget


def _widgets_in(value: Any) -> Iterator[Any]:
    items = items_of(value, sys.maxsize) if isinstance(value, list | tuple | dict) else ()
    yield from (item for item in items if is_widget(item))


def _plain(value: Any) -> Any:
    """Return a state with bytes in place of views of memory, which cannot be sent."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return bytes(value) if isinstance(value, memoryview) else value
