"""The live panel of one cell: events in, drawing out, never in the way of the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_nb.ui.fallback import (
    Mode,
    PictureSurface,
    Rung,
    Surface,
    TextSurface,
    choose_rung,
    find_display_facts,
    static_bundle,
)
from accel_nb.ui.view import Cursor, PanelState, jsonable, packed

if TYPE_CHECKING:
    from accel_nb.telemetry.events import Event
    from accel_nb.ui.widget import PanelWidget

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MIN_INTERVAL_S = 1 / 15
MAX_INTERVAL_S = 1.0
DUTY = 0.01
"""The share of one core that streaming to the browser may take."""

SNAPSHOT_POINTS = 2000
RESYNC_POINTS = 20_000


class Panel:
    """Shows a run below its cell; appears with the first step or metric, so a cell that trains nothing shows none.

    Call ``feed`` whenever events arrive, ``refresh`` in the kernel's main loop, ``finish`` once, all in the main
    thread. None of them raises: a panel that fails is given up with one warning.
    """

    def __init__(
        self,
        title: str,
        num_workers: int,
        *,
        mode: Mode = "live",
        rung: Rung | None = None,
        also: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        """``also`` gets every event that the panel is fed, shown or not."""
        self._also = also
        self.state = PanelState(title, num_workers)
        self._mode: Mode = mode
        self._rung = rung
        self._surface: Surface | None = None
        self._is_off = mode == "off"

    @property
    def is_shown(self) -> bool:
        """Whether the panel is in the output."""
        return self._surface is not None

    def feed(self, events: Sequence[Event]) -> None:
        """Take events in; draws nothing."""
        if self._also is not None:
            self._also(events)
        if not self._is_off:
            self.state.fold(events)

    def show(self) -> None:
        """Put the panel into the output now, without waiting for data."""
        if not self._is_off and self._surface is None:
            self._guarded(self._open)

    def refresh(self, force: bool = False) -> None:
        """Draw what is new; cheap when called too often."""
        if self._is_off:
            return
        if self._surface is None:
            if self.state.has_data:
                self._guarded(self._open)
            return
        surface = self._surface
        self._guarded(lambda: surface.update(self.state, force=force))

    def finish(self, status: Literal["done", "failed", "interrupted"]) -> None:
        """Draw the final state and leave a picture of it in the output."""
        if self._is_off:
            return
        self.state.finish(status)
        if self._surface is None and self.state.has_data:
            self._guarded(self._open)
        if self._surface is not None:
            surface = self._surface
            self._guarded(lambda: surface.close(self.state))
        self._is_off = True

    def _open(self) -> None:
        rung = self._rung or choose_rung(find_display_facts(), self._mode)
        surface: Surface = {"widget": WidgetSurface, "picture": PictureSurface, "text": TextSurface}[rung]()
        surface.open(self.state)
        self._surface = surface

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception:
            self._is_off = True
            logger.warning("the panel failed and is not drawn any more; the run goes on", exc_info=True)


class WidgetSurface:
    """The widget: binary deltas while the cell runs, the whole state and a picture when it has ended."""

    def __init__(self) -> None:
        self._widget: PanelWidget | None = None
        self._handle: Any = None
        self._cursor: Cursor = {}
        self._seq = 0
        self._num_marks = 0
        self._next_at = 0.0
        self._cost_s = 0.0
        # Set by the comm's thread, read in the main thread: a browser has lost its place.
        self._wants_snapshot = False

    def open(self, state: PanelState) -> None:
        """Show the widget; the data follows as messages."""
        from IPython.display import display

        from accel_nb.ui.widget import PanelWidget

        self._widget = PanelWidget()
        self._widget.on_msg(self._on_message)
        self._handle = display(self._view(state), raw=True, display_id=True)
        self.update(state, force=True)

    def update(self, state: PanelState, *, force: bool) -> None:
        """Send the new rows, at a rate that costs the kernel next to nothing."""
        started = time.monotonic()
        if not force and started < self._next_at:
            return
        found = None if self._wants_snapshot and self._seq else state.columns_since(self._cursor)
        if found is not None and not found[0] and not force:
            return
        assert self._widget is not None, "open comes first"
        started_cpu = time.thread_time()
        if found is None:
            self._wants_snapshot = False
            message, buffer, self._cursor = self._message(state, "snapshot", state.snapshot(RESYNC_POINTS))
        else:
            message, buffer, self._cursor = self._message(state, "delta", found)
        self._widget.send(message, buffers=[buffer])
        self._cost_s += 0.2 * (time.thread_time() - started_cpu - self._cost_s)
        self._next_at = started + min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, self._cost_s / DUTY))

    def close(self, state: PanelState) -> None:
        """Save the final state in the widget and add the picture to the output."""
        assert self._widget is not None, "open comes first"
        message, buffer, _ = self._message(state, "snapshot", state.snapshot(SNAPSHOT_POINTS))
        self._widget.save(message, buffer)
        self._widget.on_msg(self._on_message, remove=True)
        self._handle.update({**self._view(state), **static_bundle(state)}, raw=True)

    def _view(self, state: PanelState) -> dict[str, Any]:
        assert self._widget is not None, "open comes first"
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": state.summary()}

    def _message(self, state: PanelState, kind: str, found: Any) -> tuple[dict[str, Any], bytes, Cursor]:
        blocks, cursor = found
        headers, buffer = packed(blocks)
        message = {
            "kind": kind,
            "version": PROTOCOL_VERSION,
            "base": self._seq,
            "seq": self._seq + 1,
            "blocks": headers,
            "facts": state.facts(),
        }
        if kind == "snapshot" or len(state.marks) != self._num_marks:
            message["marks"] = [
                {"x": jsonable(mark.x), "kind": mark.kind, "rank": mark.rank, "text": mark.text} for mark in state.marks
            ]
            self._num_marks = len(state.marks)
        self._seq += 1
        return message, buffer, cursor

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "resync":
            self._wants_snapshot = True
