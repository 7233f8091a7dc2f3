"""The panel as one line of text: overwritten while the cell runs in a terminal, appended as new lines elsewhere."""

from __future__ import annotations

import os
import sys
import time

from accel_nb.ui.view import PanelState

INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 30.0
"""The time between two lines where a line cannot be overwritten, as in files."""
BAR_WIDTH = 24
DEFAULT_WIDTH = 100
CLEAR = "\r\x1b[K"


class TerminalDisplay:
    """Writes the line to the standard output; ``prepare_for_text`` removes it before other text is written."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._is_open_line = False
        self._is_terminal = False

    def open(self, state: PanelState) -> None:
        """Write the first line."""
        self._is_terminal = sys.stdout.isatty()
        self._next_at = 0.0 if self._is_terminal else time.monotonic() + PLAIN_INTERVAL_S
        self.update(state, force=False)

    def update(self, state: PanelState, *, force: bool) -> None:
        """Write the line again if the interval since the last one has passed."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + (INTERVAL_S if self._is_terminal else PLAIN_INTERVAL_S)
        if self._is_terminal:
            sys.stdout.write(CLEAR + progress_line(state, _width()))
            self._is_open_line = True
        else:
            sys.stdout.write(progress_line(state, None) + "\n")
        sys.stdout.flush()

    def prepare_for_text(self) -> None:
        """Remove the line; the next update writes it again, below what has been written."""
        if self._is_open_line:
            sys.stdout.write(CLEAR)
            self._is_open_line = False
            self._next_at = min(self._next_at, time.monotonic() + INTERVAL_S)

    def close(self, state: PanelState) -> None:
        """Write the summary in place of the line."""
        self.prepare_for_text()
        sys.stdout.write(state.summary() + "\n")
        sys.stdout.flush()


def progress_line(state: PanelState, width: int | None) -> str:
    """Return epoch, bar, step, losses, rate and remaining time in at most ``width`` characters."""
    facts, progress = state.facts(), state.progress
    parts: list[str] = []
    if progress["epoch"]:
        total = f"/{progress['num_epochs']}" if progress["num_epochs"] else ""
        parts.append(f"epoch {progress['epoch']}{total}")
    fraction = progress["fraction"]
    if fraction is None:
        fraction = progress["batch_fraction"]
    if isinstance(fraction, float):
        parts.append(f"{_bar(fraction)} {fraction * 100:3.0f} %")
    if facts["step"]:
        parts.append(f"step {facts['step']:,}")
    parts += [f"{loss['name']} {_short(loss['value'])}" for loss in facts["losses"][:3]]
    parts += [f"{metric['name']} {_short(metric['value'])}" for metric in facts["metrics"][:2]]
    if isinstance(facts["step_ms"], float):
        parts.append(f"{facts['step_ms']:.3g} ms/step")
    if isinstance(facts["samples_per_s"], float):
        parts.append(f"{facts['samples_per_s']:,.0f} samples/s")
    remaining_s = progress["remaining_s"]
    if isinstance(remaining_s, float):
        parts.append(f"{clock(remaining_s)} left")
    line = "  ".join(parts)
    while width is not None and len(line) > width and len(parts) > 2:
        # The remaining time is kept; the parts before it are dropped, the last one first.
        parts.pop(-2 if isinstance(remaining_s, float) else -1)
        line = "  ".join(parts)
    return line if width is None else line[:width]


def clock(seconds: float) -> str:
    """Return a duration as ``0:32`` or ``1:02:03``."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _bar(fraction: float) -> str:
    filled = min(BAR_WIDTH, round(fraction * BAR_WIDTH))
    return "━" * filled + "─" * (BAR_WIDTH - filled)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns - 1
    except (OSError, ValueError):  # not a terminal of the operating system
        return DEFAULT_WIDTH
