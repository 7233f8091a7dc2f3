"""The choice of how a panel is displayed, and the displays without widgets: a redrawn picture, and one line of text.

The widget is in `accel_nb.ui.panel`; a picture with buttons, made of core ipywidgets, in `accel_nb.ui.core_widgets`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from accel_nb.runtime.process.platforms import PLATFORMS, DisplayMode, detect_platform
from accel_nb.ui.view import PanelState

Mode = Literal["live", "static", "off"]

BEST_DISPLAYS = {platform.name: platform.display_mode for platform in PLATFORMS}
"""The best display mode of each platform: some cannot load anywidget, others support no widgets at all."""

PICTURE_INTERVAL_S = 2.0
PICTURE_CPU_SHARE = 0.03
"""The largest fraction of the kernel's time that is spent on drawing pictures."""


@dataclass(frozen=True, slots=True)
class DisplayFacts:
    """Facts that decide how a panel is shown."""

    platform: str
    has_kernel: bool
    importable: frozenset[str]
    has_bundle: bool


def choose_display(facts: DisplayFacts, mode: Mode) -> DisplayMode:
    """Return the best available way to show a panel. Each leaves an output in a saved notebook."""
    if not facts.has_kernel:
        return "text"
    best = BEST_DISPLAYS[facts.platform] if mode == "live" else "picture"
    if best == "widget" and facts.has_bundle and "anywidget" in facts.importable:
        return "widget"
    if "matplotlib" not in facts.importable:
        return "text"
    return "core widget" if best in ("widget", "core widget") and "ipywidgets" in facts.importable else "picture"


def find_display_facts() -> DisplayFacts:
    """Find the facts of this process, without importing the packages."""
    from importlib.util import find_spec
    from pathlib import Path

    from IPython.core.getipython import get_ipython

    return DisplayFacts(
        platform=detect_platform().name,
        has_kernel=getattr(get_ipython(), "kernel", None) is not None,
        importable=frozenset(name for name in ("anywidget", "ipywidgets", "matplotlib") if find_spec(name) is not None),
        has_bundle=(Path(__file__).parent / "static" / "widget.js").is_file(),
    )


class PanelDisplay(Protocol):
    """A display of a panel in a cell's output.

    ``open`` is called once, ``update`` often, and ``close`` once, all in the main thread.
    """

    def open(self, state: PanelState) -> None:
        """Put the panel into the cell's output."""
        ...

    def update(self, state: PanelState, *, force: bool) -> None:
        """Draw new data, if enough time has passed since the last update or if ``force``."""
        ...

    def prepare_for_text(self) -> None:
        """Prepare for text that the cell is about to print."""
        ...

    def close(self, state: PanelState) -> None:
        """Draw the final state, which is saved in the notebook."""
        ...


class TextDisplay:
    """Displays one line when the run has ended, for front ends that can draw nothing else."""

    def open(self, state: PanelState) -> None:
        """Do nothing: a displayed line cannot be replaced."""

    def update(self, state: PanelState, *, force: bool) -> None:
        """Do nothing."""

    def prepare_for_text(self) -> None:
        """Do nothing."""

    def close(self, state: PanelState) -> None:
        """Show the summary."""
        from IPython.display import display

        display({"text/plain": state.summary()}, raw=True)


class Painter:
    """Draws pictures, and limits the share of time that drawing takes."""

    def __init__(self) -> None:
        self._next_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for another picture."""
        return time.monotonic() >= self._next_at

    def draw(self, state: PanelState) -> dict[str, Any]:
        """Return the panel as a MIME bundle, and set when the next picture is due."""
        started = time.monotonic()
        bundle = static_bundle(state)
        now = time.monotonic()
        self._next_at = now + max(PICTURE_INTERVAL_S, (now - started) / PICTURE_CPU_SHARE)
        return bundle


class PictureDisplay:
    """Shows a PNG, redrawn every few seconds by its display id."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._painter = Painter()

    def open(self, state: PanelState) -> None:
        """Show the first picture."""
        from IPython.display import display

        self._handle = display(self._painter.draw(state), raw=True, display_id=True)

    def update(self, state: PanelState, *, force: bool) -> None:
        """Draw again if a picture is due or if ``force``."""
        if force or self._painter.is_due:
            self._handle.update(self._painter.draw(state), raw=True)

    def prepare_for_text(self) -> None:
        """Do nothing: printed text is a separate output of the cell."""

    def close(self, state: PanelState) -> None:
        """Show the last picture."""
        self._handle.update(static_bundle(state), raw=True)


def static_bundle(state: PanelState) -> dict[str, Any]:
    """Return the panel as a MIME bundle: a PNG picture and a line of text."""
    from accel_nb.ui.picture import draw_png

    return {"image/png": draw_png(state), "text/plain": state.summary()}
