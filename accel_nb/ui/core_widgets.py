"""The panel made of core ipywidgets, for front ends without anywidget: a picture, a line of figures, and buttons.

Importing this module imports ipywidgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from typing import Any

from ipywidgets import HTML, Button, HBox, Image, Layout, VBox

from accel_nb.ui.comm_routing import handle_beside_cells
from accel_nb.ui.fallback import Painter, static_bundle
from accel_nb.ui.picture import STATUS_COLORS
from accel_nb.ui.view import PanelState

LINE_INTERVAL_S = 0.5
SAVE_HINT = "Save a checkpoint after this step"
NO_FOLDER_HINT = "The cell was started without --checkpoint DIR"

Control = Callable[[object], object]


class CoreWidgetDisplay:
    """Displays a picture, redrawn every few seconds, and a line of figures, updated twice a second.

    When the run has ended, a picture and text replace the widgets, so that any viewer of the saved notebook shows them.
    """

    def __init__(self, on_control: Control | None = None) -> None:
        self._on_control = on_control
        self._painter = Painter()
        self._next_line_at = 0.0
        self._is_paused = False
        self._handle: Any = None
        self._line = HTML()
        self._action_result = HTML()
        self._image = Image(format="png", layout=Layout(width="100%", max_width="960px"))
        self._pause = self._button("pause", "Stop drawing; the run continues", self._toggle)
        self._panel = VBox([self._line, self._image])

    def open(self, state: PanelState) -> None:
        """Show figures, the first picture and the buttons."""
        from IPython.display import display

        self._panel.children = [
            self._line,
            self._image,
            HBox([*self._controls(state), self._pause, self._action_result]),
        ]
        bundle = self._draw(state)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._panel.model_id}
        self._handle = display(
            {"application/vnd.jupyter.widget-view+json": view, "text/plain": bundle["text/plain"]},
            raw=True,
            display_id=True,
        )

    def update(self, state: PanelState, *, force: bool) -> None:
        """Update figures and picture, each when it is due."""
        if not self._is_paused and (force or self._painter.is_due):
            self._draw(state)
        elif force or time.monotonic() >= self._next_line_at:
            self._write(state)

    def prepare_for_text(self) -> None:
        """Do nothing: printed text is a separate output of the cell."""

    def close(self, state: PanelState) -> None:
        """Replace the widgets by picture and text."""
        self._handle.update(static_bundle(state), raw=True)
        for widget in (*self._panel.children[-1].children, *self._panel.children, self._panel):
            widget.close()

    def _controls(self, state: PanelState) -> list[Button]:
        if self._on_control is None or not state.accepts_actions:
            return []
        save = self._add_action("checkpoint now", SAVE_HINT if state.can_save else NO_FOLDER_HINT, "checkpoint")
        save.disabled = not state.can_save
        return [
            self._add_action("stop after step", "End the cell after this step and keep its training so far", "stop"),
            self._add_action("interrupt", "Interrupt the cell at once", "interrupt"),
            save,
        ]

    def _add_action(self, label: str, hint: str, kind: str) -> Button:
        def send() -> None:
            assert self._on_control is not None, "controls exist only with on_control"
            self._on_control({"kind": kind})

        return self._button(label, hint, send)

    def _button(self, label: str, hint: str, act: Callable[[], None]) -> Button:
        button = Button(description=label, tooltip=hint, layout=Layout(width="auto"))
        button.on_click(lambda _: act())
        handle_beside_cells(button.comm)
        return button

    def _toggle(self) -> None:
        self._is_paused = not self._is_paused
        self._pause.description = "resume drawing" if self._is_paused else "pause"

    def _draw(self, state: PanelState) -> dict[str, Any]:
        bundle = self._painter.draw(state)
        self._image.value = bundle["image/png"]
        self._write(state)
        return bundle

    def _write(self, state: PanelState) -> None:
        self._next_line_at = time.monotonic() + LINE_INTERVAL_S
        color = STATUS_COLORS[state.status]
        notes = "".join(f" · {escape(note)}" for note in state.notes())
        status = f'<span style="color: {color}">●</span> <b>{escape(state.status)}</b>'
        self._line.value = f"{status} {escape(state.title)}: {escape(state.summary())}{notes}"
        self._action_result.value = escape(state.action_result)
