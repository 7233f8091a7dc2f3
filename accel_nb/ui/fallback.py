"""How a panel is shown here: as a live widget, as a picture that is drawn anew, or as one line of text.

`accel_nb.ui.core_widgets` has what lies between the first two: the picture with buttons, as widgets of ipywidgets.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from accel_nb.runtime.process.platforms import PLATFORMS, Rung, detect_platform
from accel_nb.ui.view import PanelState

Mode = Literal["live", "static", "off"]

BEST_RUNGS = {platform.name: platform.rung for platform in PLATFORMS}
"""What each front end shows: some are built without anywidget and cannot fetch it, others have no widgets at all."""

PICTURE_INTERVAL_S = 2.0
PICTURE_DUTY = 0.03
"""The share of the kernel's time that drawing pictures may take."""


@dataclass(frozen=True, slots=True)
class DisplayFacts:
    """What the choice of a rung depends on."""

    platform: str
    has_kernel: bool
    importable: frozenset[str]
    has_bundle: bool


def choose_rung(facts: DisplayFacts, mode: Mode) -> Rung:
    """Return the best way to show a panel; every one of them leaves something to see in a saved notebook."""
    if not facts.has_kernel:
        return "text"
    best = BEST_RUNGS[facts.platform] if mode == "live" else "picture"
    if best == "widget" and facts.has_bundle and "anywidget" in facts.importable:
        return "widget"
    if "matplotlib" not in facts.importable:
        return "text"
    return "core widget" if best in ("widget", "core widget") and "ipywidgets" in facts.importable else "picture"


def find_display_facts() -> DisplayFacts:
    """Look at this process; imports nothing heavy."""
    from importlib.util import find_spec
    from pathlib import Path

    from IPython.core.getipython import get_ipython

    return DisplayFacts(
        platform=detect_platform().name,
        has_kernel=getattr(get_ipython(), "kernel", None) is not None,
        importable=frozenset(name for name in ("anywidget", "ipywidgets", "matplotlib") if find_spec(name) is not None),
        has_bundle=(Path(__file__).parent / "static" / "widget.js").is_file(),
    )


class Surface(Protocol):
    """Where a panel is drawn. Calls: ``open`` once, ``update`` often, ``close`` once; all in the main thread."""

    def open(self, state: PanelState) -> None:
        """Put the panel into the cell's output."""
        ...

    def update(self, state: PanelState, *, force: bool) -> None:
        """Draw what is new, unless it was drawn a moment ago."""
        ...

    def close(self, state: PanelState) -> None:
        """Draw the final state, the way a saved notebook keeps it."""
        ...


class TextSurface:
    """One line when the run has ended: for terminals, and where nothing else can be drawn."""

    def open(self, state: PanelState) -> None:
        """Wait for the end: a terminal cannot take a line back."""

    def update(self, state: PanelState, *, force: bool) -> None:
        """Wait for the end."""

    def close(self, state: PanelState) -> None:
        """Show the summary."""
        from IPython.display import display

        display({"text/plain": state.summary()}, raw=True)


class Painter:
    """Draws pictures, and knows when the kernel can spare the next one."""

    def __init__(self) -> None:
        self._next_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for another picture."""
        return time.monotonic() >= self._next_at

    def draw(self, state: PanelState) -> dict[str, Any]:
        """Return a picture and a line of text."""
        started = time.monotonic()
        bundle = static_bundle(state)
        now = time.monotonic()
        self._next_at = now + max(PICTURE_INTERVAL_S, (now - started) / PICTURE_DUTY)
        return bundle


class PictureSurface:
    """A PNG in the output, drawn anew every few seconds through its display id."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._painter = Painter()

    def open(self, state: PanelState) -> None:
        """Show the first picture."""
        from IPython.display import display

        self._handle = display(self._painter.draw(state), raw=True, display_id=True)

    def update(self, state: PanelState, *, force: bool) -> None:
        """Draw again when it is time."""
        if force or self._painter.is_due:
            self._handle.update(self._painter.draw(state), raw=True)

    def close(self, state: PanelState) -> None:
        """Show the last picture."""
        self._handle.update(static_bundle(state), raw=True)


def static_bundle(state: PanelState) -> dict[str, Any]:
    """Return the panel as a picture and a line of text."""
    from accel_nb.ui.picture import draw_png

    return {"image/png": draw_png(state), "text/plain": state.summary()}
