"""The live panel's widget. Importing this module imports anywidget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from accel_nb.ui.comm_routing import handle_beside_cells

BUNDLE = Path(__file__).parent / "static" / "widget.js"


class PanelWidget(anywidget.AnyWidget):
    """The kernel's side of the widget. Updates are messages; the final state is in traits, which notebooks save."""

    _esm = BUNDLE

    snapshot = traitlets.Bytes(b"").tag(sync=True)
    """The final message's buffer."""

    final = traitlets.Dict().tag(sync=True)
    """The final message: empty while the cell runs."""

    def __repr__(self) -> str:
        return "accel_nb panel"

    def open(self) -> None:
        """Open the comm; ipywidgets calls this when the widget is made."""
        super().open()
        handle_beside_cells(self.comm)

    def save(self, message: dict[str, Any], buffer: bytes) -> None:
        """Set the final state in one update."""
        with self.hold_sync():
            self.snapshot = buffer
            self.final = message
