"""The live panel of one cell. Drawing is limited to a share of CPU time, and no error of the panel ends the run."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accel_nb.runtime.process.hardware import num_usable_cores
from accel_nb.runtime.process.platforms import DisplayMode
from accel_nb.ui.fallback import (
    Mode,
    PanelDisplay,
    PictureDisplay,
    TextDisplay,
    choose_display,
    find_display_facts,
    static_bundle,
)
from accel_nb.ui.message_values import to_json_number
from accel_nb.ui.messages import PanelFacts
from accel_nb.ui.panel_tables import Cursor, pack_blocks
from accel_nb.ui.progress import LoopPlan
from accel_nb.ui.queries import Query, QuerySources, read_query
from accel_nb.ui.run_comparison import EarlierRun, EarlierRuns
from accel_nb.ui.terminal import TerminalDisplay
from accel_nb.ui.view import PanelState

if TYPE_CHECKING:
    from accel_nb.telemetry.events import Event
    from accel_nb.ui.widget import PanelWidget

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MIN_INTERVAL_S = 1 / 15
MAX_INTERVAL_S = 1.0
CPU_SHARE = 0.0015
"""CPU time of the main thread for messages to the browser, as a share of the time of all cores, which the training
may need. Jupyter's threads, which send the messages, use nearly as much again."""

BYTES_PER_S = 64_000
"""Limit of the rate at which rows are sent. Rows of a faster run are downsampled to minima and maxima; the browser
queries the rows of a range that the user zooms into."""

ENVELOPE_BYTES = 2000
"""Approximate size of a message without its rows."""

NUMBER_BYTES = 8
"""Approximate size of a number in a memory snapshot."""

SAVED_TEXT = 4000
"""The number of characters of printed text in the final state, for pages that were loaded before the end."""

MAX_PAGE = 64
"""Maximum length of a page's name, which the browser generates."""

MAX_QUERIES = 16
"""Maximum number of queued queries from the browser; further ones are dropped."""

MARK = {"accel_nb": "panel"}
"""Metadata of the output; by it the browser detects panels whose kernel has ended."""

SNAPSHOT_POINTS = 2000
RESYNC_POINTS = 20_000
MAX_DISPLAYS = 4
"""Maximum number of outputs that a panel is drawn in; with more, those it was attached to last."""


class Panel:
    """Shows a run below its cell, from the first step or metric on: a cell that trains nothing has no panel.

    Call ``feed`` when events arrive, ``refresh`` in the loop that waits for the workers, and ``finish`` once. Call
    ``attach`` and ``show_action_result`` at any time, in any thread. None of them raises: after an error the panel logs
    one warning and draws no more.
    """

    def __init__(
        self,
        title: str,
        num_workers: int,
        *,
        mode: Mode = "live",
        display: DisplayMode | None = None,
        on_control: Callable[[object], object] | None = None,
        can_save: bool = False,
        on_events: Callable[[Sequence[Event]], None] | None = None,
        earlier: EarlierRuns | None = None,
        plan: LoopPlan | None = None,
    ) -> None:
        """Begin without data; ``on_events`` gets all events, also while the panel is off; ``earlier`` stores the run.

        ``plan`` is the length of the cell's outermost loop, in epochs or steps.
        """
        self._on_events = on_events
        self._earlier = earlier or EarlierRuns()
        self._number = self._earlier.begin()
        self.state = PanelState(title, num_workers, plan=plan)
        self.state.accepts_actions = on_control is not None
        self.state.can_save = can_save
        self.state.num_earlier = len(self._earlier.others(self._number))
        self._mode: Mode = mode
        self._display_mode: DisplayMode | None = display
        # Called with actions from the browser, unchecked, in the comm's thread.
        self._on_control = on_control
        self._displays: list[PanelDisplay] = []
        self._is_off = mode == "off"
        self._is_finished = False
        self._lock = threading.RLock()

    @property
    def is_shown(self) -> bool:
        """Whether the panel is in an output."""
        return bool(self._displays)

    def feed(self, events: Sequence[Event]) -> None:
        """Update the state by events; draw nothing."""
        with self._lock:
            if self._on_events is not None:
                self._on_events(events)
            if not self._is_off:
                self.state.apply(events)

    def add_text(self, text: str) -> None:
        """Add printed text, which the panel shows in pages that were reloaded while the cell ran.

        Jupyter sends the output of a running cell only to the page that started it.
        """
        with self._lock:
            if not self._is_off:
                self.state.add_text(text)

    def prepare_for_text(self) -> None:
        """Prepare for text that the cell is about to print: remove a terminal's line until the next refresh."""
        with self._lock:
            for display in self._displays:
                self._guarded(display.prepare_for_text)

    def show_action_result(self, text: str, is_final: bool = True) -> None:
        """Show the result of the user's last action; call again with the final result after one that is not final."""
        self.state.set_action_result(text, is_final=is_final)

    def facts(self) -> PanelFacts:
        """Return the run's figures, in any thread."""
        with self._lock:
            return self.state.facts()

    def show(self) -> None:
        """Display the panel in the cell's output, even without data."""
        with self._lock:
            if not self._is_off and not self._displays:
                self._guarded(self._open)

    def attach(self) -> None:
        """Draw the panel in the current output too, with all data so far; the run updates all outputs of the panel."""
        with self._lock:
            if self._mode == "off" or not self.state.has_data:
                return
            if self._is_finished:
                self._guarded(lambda: self._open().close(self.state))
            else:
                self._guarded(self._open)

    def refresh(self, force: bool = False) -> None:
        """Draw new data if the interval since the last drawing has passed; may be called often."""
        with self._lock:
            if self._is_off:
                return
            if not self._displays:
                if self.state.has_data:
                    self._guarded(self._open)
                return
            for display in self._displays:
                self._guarded(lambda display=display: display.update(self.state, force=force))

    def finish(self, status: Literal["done", "failed", "interrupted"]) -> None:
        """Draw the final state and leave a picture of it in the output."""
        with self._lock:
            if self._is_off:
                return
            self.state.finish(status)
            if not self._displays and self.state.has_data:
                self._guarded(self._open)
            for display in self._displays:
                self._guarded(lambda display=display: display.close(self.state))
            self._guarded(lambda: self._earlier.keep(self._number, self.state))
            self._is_off = self._is_finished = True

    def _open(self) -> PanelDisplay:
        mode = self._display_mode or choose_display(find_display_facts(), self._mode)
        display = self._make_display(mode)
        display.open(self.state)
        self._displays = [*self._displays, display][-MAX_DISPLAYS:]
        return display

    def _make_display(self, mode: DisplayMode) -> PanelDisplay:
        if mode == "widget":
            earlier, number = self._earlier, self._number
            return WidgetDisplay(self._on_control, lambda: earlier.others(number))
        if mode == "core widget":
            from accel_nb.ui.core_widgets import CoreWidgetDisplay

            return CoreWidgetDisplay(self._on_control)
        if mode == "picture":
            return PictureDisplay()
        return TextDisplay() if find_display_facts().has_kernel else TerminalDisplay()

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except Exception:
            self._is_off = True
            logger.warning("the panel failed and is no longer drawn; the run continues", exc_info=True)


class WidgetDisplay:
    """Displays the panel as a widget: sends binary deltas while the cell runs, then the whole state and a picture."""

    def __init__(
        self,
        on_control: Callable[[object], object] | None = None,
        others: Callable[[], Sequence[EarlierRun]] = tuple,
    ) -> None:
        self._on_control = on_control
        # The runs that this one can be compared with.
        self._others = others
        self._widget: PanelWidget | None = None
        self._handle: Any = None
        self._cursor: Cursor = {}
        self._seq = 0
        self._num_marks = 0
        self._num_snapshots = 0
        self._action_result = ""
        self._text = ""
        # The number of pages that have requested the state: all but the first were loaded while the cell ran.
        self._num_pages = 0
        self._new_page = ""
        self._next_at = 0.0
        self._cost_s = 0.0
        self._cpu_share = CPU_SHARE * num_usable_cores()
        self._sent_at = 0.0
        # Set in the comm's thread, read in the main thread: whether a browser needs a snapshot, and its queries.
        self._snapshot_requested = False
        self._queries: deque[Query] = deque()
        # A weak reference to the state of the ended run; None before the end.
        self._ended: Callable[[], PanelState | None] | None = None

    def open(self, state: PanelState) -> None:
        """Display the widget, whose data is sent as messages."""
        from IPython.display import display

        started = time.monotonic()
        from accel_nb.ui.widget import PanelWidget

        self._widget = PanelWidget()
        self._widget.on_msg(self._on_message)
        self._handle = display(self._view(state), raw=True, display_id=True, metadata=MARK)
        self.update(state, force=True)
        self._sent_at = started  # rows that arrived meanwhile are sent unthinned

    def update(self, state: PanelState, *, force: bool) -> None:
        """Send new rows, within the limits of bandwidth and CPU time."""
        started = time.monotonic()
        if not force and started < self._next_at:
            return
        num_bytes = self._answer(state)
        max_bytes = BYTES_PER_S * max(MIN_INTERVAL_S, started - self._sent_at) - ENVELOPE_BYTES
        # A panel that is opened late begins with a snapshot of as many points as a chart can show.
        needs_snapshot = self._snapshot_requested if self._seq else state.tables.num_rows > RESYNC_POINTS
        found = None if needs_snapshot else state.tables.rows_since(self._cursor, int(max_bytes))
        has_new_content = (
            state.action_result != self._action_result
            or state.num_snapshots != self._num_snapshots
            or self._has_new_text(state)
        )
        if found is not None and not found[0] and not force and not has_new_content:
            self._next_at = started + num_bytes / BYTES_PER_S
            return
        assert self._widget is not None, "open comes first"
        started_cpu = time.thread_time()
        if found is None:
            self._snapshot_requested = False
            message, buffer, self._cursor = self._message(state, "snapshot", state.tables.snapshot(RESYNC_POINTS))
        else:
            message, buffer, self._cursor = self._message(state, "delta", found)
        self._widget.send(message, buffers=[buffer])
        self._sent_at = started
        self._cost_s += 0.2 * (time.thread_time() - started_cpu - self._cost_s)
        num_bytes += len(buffer) + ENVELOPE_BYTES
        num_bytes += NUMBER_BYTES * sum(len(found["blocks"]) for found in message.get("memory_snapshots", ()))
        interval_s = max(MIN_INTERVAL_S, self._cost_s / self._cpu_share, num_bytes / BYTES_PER_S)
        self._next_at = started + min(MAX_INTERVAL_S, interval_s)

    def prepare_for_text(self) -> None:
        """Do nothing: printed text is a separate output of the cell."""

    def close(self, state: PanelState) -> None:
        """Save the final state in the widget and add the picture to the output."""
        assert self._widget is not None, "open comes first"
        message, buffer, _ = self._message(state, "snapshot", state.tables.snapshot(SNAPSHOT_POINTS))
        message["text"] = state.text[-SAVED_TEXT:]
        self._widget.save(message, buffer)
        self._ended = weakref.ref(state)
        self._handle.update({**self._view(state), **static_bundle(state)}, raw=True, metadata=MARK)

    def _view(self, state: PanelState) -> dict[str, Any]:
        assert self._widget is not None, "open comes first"
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": state.summary()}

    def _message(self, state: PanelState, kind: str, found: Any) -> tuple[dict[str, Any], bytes, Cursor]:
        blocks, cursor = found
        headers, buffer = pack_blocks(blocks)
        message = {
            "kind": kind,
            "version": PROTOCOL_VERSION,
            "base": self._seq,
            "seq": self._seq + 1,
            "blocks": headers,
            "facts": state.facts(),
        }
        self._action_result = message["facts"]["action_result"]
        if kind == "snapshot" or len(state.marks) != self._num_marks:
            message["marks"] = _marks(state)
            self._num_marks = len(state.marks)
        if self._new_page or self._has_new_text(state):
            message["text"] = self._text = state.text
        if self._new_page:
            message["page"], self._new_page = self._new_page, ""
        if state.snapshots and (kind == "snapshot" or state.num_snapshots != self._num_snapshots):
            message["memory_snapshots"] = state.memory_snapshots()
            self._num_snapshots = state.num_snapshots
        self._seq += 1
        return message, buffer, cursor

    def _has_new_text(self, state: PanelState) -> bool:
        return self._num_pages > 1 and state.text != self._text

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "resync":
            self._snapshot_requested = True
            page = content.get("page")
            if isinstance(page, str) and page:
                self._num_pages += 1
                self._new_page = page[:MAX_PAGE] if self._num_pages > 1 else ""
        elif kind == "control" and self._on_control is not None:
            self._on_control(content.get("action"))
        elif (query := read_query(content)) is not None and len(self._queries) < MAX_QUERIES:
            self._queries.append(query)
            if self._ended is not None:
                self._answer(self._ended())

    def _answer(self, state: PanelState | None) -> int:
        """Answer the queued queries; return the number of bytes sent."""
        waiting: dict[object, Query] = {}
        while self._queries:
            query = self._queries.popleft()
            waiting[query.key] = query
        if self._widget is None:
            return 0
        num_bytes = 0
        for query in waiting.values():
            message, blocks = query.answer(QuerySources(state, self._others(), _save_html))
            headers, buffer = pack_blocks(blocks)
            self._widget.send({**message, "version": PROTOCOL_VERSION, "blocks": headers}, buffers=[buffer])
            num_bytes += len(buffer) + ENVELOPE_BYTES
        return num_bytes


def _marks(state: PanelState) -> list[dict[str, Any]]:
    return [
        {"x": to_json_number(mark.x), "kind": mark.kind, "rank": mark.rank, "text": mark.text} for mark in state.marks
    ]


def _save_html(state: PanelState) -> str:
    """Write the run as one HTML file in the notebook's folder and return its name."""
    from accel_nb.ui.share import SHARED_POINTS, save_html

    headers, buffer = pack_blocks(state.tables.snapshot(SHARED_POINTS)[0])
    message = {
        "kind": "snapshot",
        "version": PROTOCOL_VERSION,
        "base": 0,
        "seq": 1,
        "blocks": headers,
        "facts": state.facts(),
        "marks": _marks(state),
        "memory_snapshots": state.memory_snapshots(),
    }
    return save_html(state, message, buffer)
