"""A pair of linear axes on a canvas: range, ticks, grid, curves and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_nb.ui.agg_canvas import AggCanvas, Box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INK, FAINT, GRID = "#1f2328", "#656d76", "#e4e7eb"
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
LARGEST = 1e300
"""A larger number is drawn as this one, so that differences are finite."""
SMALL, LARGE = 1e-3, 1e7
"""Between them numbers have no exponent."""


class PlotAxes:
    """Axes inside of a box of the canvas; x and y ranges are of finite numbers and not empty."""

    def __init__(self, canvas: AggCanvas, box: Box, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._canvas = canvas
        self.box = box
        self._x_range, self._y_range = x_range, y_range

    def frame(self, x_label: str, *, num_y_ticks: int, shows_x_ticks: bool = True) -> None:
        """Draw grid, axes and the labels of the ticks."""
        canvas, (left, bottom, right, top) = self._canvas, self.box
        x_ticks, x_step = ticks(*self._x_range, 8 if right - left > 400 else 6)
        for tick, text in zip(x_ticks, tick_texts(x_ticks, x_step), strict=True):
            x = float(self._x(tick))
            canvas.line([x, x], [bottom, top], GRID, 0.7)
            canvas.line([x, x], [bottom - 5, bottom], FAINT, 0.8)
            if shows_x_ticks:
                canvas.text(x, bottom - 17, text, size=7.5, color=FAINT, anchor="center")
        y_ticks, y_step = ticks(*self._y_range, num_y_ticks)
        for tick, text in zip(y_ticks, tick_texts(y_ticks, y_step), strict=True):
            y = float(self._y(tick))
            canvas.line([left, right], [y, y], GRID, 0.7)
            canvas.line([left - 5, left], [y, y], FAINT, 0.8)
            canvas.text(left - 11, y, text, size=7.5, color=FAINT, anchor="right")
        canvas.line([left, left, right], [top, bottom, bottom], GRID, 0.8)
        if x_label:
            canvas.text((left + right) / 2, bottom - 37, x_label, size=8, color=FAINT, anchor="center")

    def curve(self, xs: Any, ys: Any, color: str, width: float, *, alpha: float = 1.0, has_dots: bool = False) -> None:
        """Draw a line through points, with a dot at each if ``has_dots``."""
        across, up = self._x(xs), self._y(ys)
        self._canvas.line(across, up, color, width, alpha=alpha, inside=self.box)
        if has_dots:
            for x, y in zip(across, up, strict=True):
                if math.isfinite(y):
                    self._dot(x, y, color)

    def band(self, xs: Any, low: Any, high: Any, color: str, *, alpha: float) -> None:
        """Fill between two curves; where a value is not finite there is a gap."""
        import numpy as np

        across, lower, upper = self._x(xs), self._y(low), self._y(high)
        is_gap = np.isnan(lower) | np.isnan(upper)
        for part in np.split(np.arange(len(across)), np.flatnonzero(np.diff(is_gap)) + 1):
            if len(part) and not is_gap[part[0]]:
                around = np.concatenate([across[part], across[part][::-1]])
                edges = np.concatenate([upper[part], lower[part][::-1]])
                self._canvas.area(around, edges, color, alpha=alpha, inside=self.box)

    def stack(self, xs: Any, rows: Any, colors: Sequence[str]) -> None:
        """Draw rows of values as areas on top of each other."""
        import numpy as np

        across = self._x(xs)
        tops = np.vstack([np.zeros(len(xs)), np.cumsum(np.asarray(rows, float), axis=0)])
        edges = self._y(tops)
        for lower, upper, color in zip(edges[:-1], edges[1:], colors, strict=True):
            xs_around = np.concatenate([across, across[::-1]])
            self._canvas.area(xs_around, np.concatenate([upper, lower[::-1]]), color, inside=self.box)

    def vertical(self, x: float, color: str, *, is_short: bool) -> None:
        """Mark a position with a dashed line, or with a tick at the top if ``is_short``."""
        _, bottom, _, top = self.box
        across = float(self._x(x))
        if is_short:
            self._canvas.line([across, across], [top - 0.04 * (top - bottom), top], color, 2.0)
        else:
            self._canvas.line([across, across], [bottom, top], color, 0.8, dashes=(2.4, 2.4))

    def title(self, text: str, *, above: float) -> None:
        """Write the title this many pixels above the box."""
        left, _, _, top = self.box
        self._canvas.text(left, top + above, text, size=9, color=INK, is_bold=True)

    def caption(self, text: str) -> None:
        """Write a text into the upper right corner, on a light ground."""
        _, _, right, top = self.box
        width = self._canvas.text_width(text, 7.5)
        edges = right - 11 - width, right - 3
        self._canvas.area([*edges, *edges[::-1]], [top - 31, top - 31, top - 7, top - 7], "white", alpha=0.75)
        self._canvas.text(right - 7, top - 19, text, size=7.5, color=INK, anchor="right")

    def legend(self, entries: Sequence[tuple[str, str, float]], *, is_line: bool) -> None:
        """Write names with their colors and opacities right-aligned above the box."""
        canvas, (_, _, right, top) = self._canvas, self.box
        y, x = top + 14, right + 2
        for name, color, alpha in reversed(entries):
            x -= canvas.text_width(name, 7)
            canvas.text(x, y, name, size=7, color=INK)
            if is_line:
                canvas.line([x - 20, x - 6], [y, y], color, 1.2, alpha=alpha)
            else:
                canvas.area([x - 20, x - 6, x - 6, x - 20], [y - 5, y - 5, y + 5, y + 5], color, alpha=alpha)
            x -= 32

    def _dot(self, x: float, y: float, color: str) -> None:
        angles = [math.tau * index / 16 for index in range(16)]
        self._canvas.area([x + 4 * math.cos(a) for a in angles], [y + 4 * math.sin(a) for a in angles], color)

    def _x(self, values: Any) -> NDArray[np.float64]:
        left, _, right, _ = self.box
        return _scaled(values, self._x_range, left, right)

    def _y(self, values: Any) -> NDArray[np.float64]:
        _, bottom, _, top = self.box
        return _scaled(values, self._y_range, bottom, top)


def _scaled(values: Any, limits: tuple[float, float], start: float, end: float) -> NDArray[np.float64]:
    """Return the pixels of values; NaN for those that are not finite."""
    import numpy as np

    low, high = limits
    finite = np.asarray(values, float)
    finite = np.where(np.isfinite(finite), np.clip(finite, -LARGEST, LARGEST), np.nan)
    return start + (finite - low) * ((end - start) / (high - low))


def range_of(arrays: Sequence[Any], margin: float) -> tuple[float, float]:
    """Return the range of the finite values, widened by a share of its size on both sides."""
    import numpy as np

    values = np.concatenate([np.asarray(array, float).ravel() for array in arrays]) if arrays else np.zeros(0)
    values = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    room = (high - low) * margin or abs(high) * 0.05 or 0.05
    return low - room, high + room


def ticks(low: float, high: float, max_count: int) -> tuple[list[float], float]:
    """Return round numbers in a range, at most ``max_count`` plus one, and the distance between them."""
    power = 10.0 ** math.floor(math.log10((high - low) / max_count))
    step = next(step * power for step in STEPS if step * power * max_count >= high - low or step == STEPS[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)], step


def tick_texts(values: Sequence[float], step: float) -> list[str]:
    """Return the labels of ticks as in the live chart: enough digits to distinguish neighbors, in one notation."""
    largest = max((abs(value) for value in values), default=0.0)
    digits, exponent = f"{step:.3e}".split("e")
    last_digit = int(exponent) - max(0, len(f"{float(digits):g}") - 2)
    return [_tick_text(value, step, largest, last_digit) for value in values]


def _tick_text(value: float, step: float, largest: float, last_digit: int) -> str:
    if abs(value) < step / 2:
        return "0"
    if SMALL <= largest < LARGE:
        return f"{value:,.{max(0, -last_digit)}f}".replace("-", "\N{MINUS SIGN}")
    exponent = int(f"{value:.3e}".split("e")[1])
    digits, power = f"{value:.{max(0, exponent - last_digit)}e}".split("e")
    return f"{float(digits):g}e{int(power)}".replace("-", "\N{MINUS SIGN}")
