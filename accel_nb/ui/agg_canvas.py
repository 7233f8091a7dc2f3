"""Lines, areas and text on a picture, with matplotlib's Agg renderer and without its figures, which take longer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Box = tuple[float, float, float, float]
"""Left, bottom, right and top edge, in pixels from the lower left corner."""
FONT = "DejaVu Sans"
"""The font that matplotlib includes."""


class AggCanvas:
    """A white picture. Positions are in pixels from the lower left corner, sizes of lines and text in points."""

    def __init__(self, width: int, height: int, dpi: int) -> None:
        from matplotlib.backends.backend_agg import RendererAgg

        self.width, self.height, self._dpi = width, height, dpi
        self._renderer = RendererAgg(width, height, dpi)
        self.area([0, width, width, 0], [0, 0, height, height], "white")

    def line(
        self,
        xs: Sequence[float] | NDArray[np.float64],
        ys: Sequence[float] | NDArray[np.float64],
        color: str,
        width: float,
        *,
        alpha: float = 1.0,
        dashes: Sequence[float] | None = None,
        inside: Box | None = None,
    ) -> None:
        """Draw a line through points; a point that is NaN is a gap. ``dashes`` are lengths in points."""
        context = self._context(color, alpha, inside)
        context.set_linewidth(width)
        context.set_joinstyle("round")
        if dashes is not None:
            context.set_dashes(0, list(dashes))
        self._draw(context, xs, ys, None)

    def area(
        self,
        xs: Sequence[float] | NDArray[np.float64],
        ys: Sequence[float] | NDArray[np.float64],
        color: str,
        *,
        alpha: float = 1.0,
        inside: Box | None = None,
    ) -> None:
        """Fill the polygon through points."""
        from matplotlib.colors import to_rgba

        context = self._context(color, alpha, inside)
        context.set_linewidth(0)
        self._draw(context, xs, ys, to_rgba(color, alpha))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        color: str,
        is_bold: bool = False,
        anchor: Literal["left", "center", "right"] = "left",
    ) -> float:
        """Write one line of text whose middle is at height ``y``; return its width."""
        font = _font(size, is_bold)
        width, _, _ = self._renderer.get_text_width_height_descent(text, font, False)
        _, height, descent = self._renderer.get_text_width_height_descent("lp", font, False)
        start = x - {"left": 0.0, "center": 0.5, "right": 1.0}[anchor] * width
        baseline = self.height - (y - height / 2 + descent)  # text is placed from the upper edge
        self._renderer.draw_text(self._context(color, 1.0, None), start, baseline, text, font, 0)
        return width

    def text_width(self, text: str, size: float) -> float:
        """Return the width of a line of text."""
        return self._renderer.get_text_width_height_descent(text, _font(size, False), False)[0]

    def png(self) -> bytes:
        """Return the picture with a palette: a third of the size, without a visible difference in line drawings."""
        import numpy as np
        from PIL import Image

        image = Image.fromarray(np.asarray(self._renderer.buffer_rgba())).convert("RGB")
        buffer = io.BytesIO()
        reduced = image.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        reduced.save(buffer, "PNG", compress_level=6, dpi=(self._dpi, self._dpi))  # 9 takes four times as long
        return buffer.getvalue()

    def _context(self, color: str, alpha: float, inside: Box | None) -> Any:
        from matplotlib.transforms import Bbox

        context = self._renderer.new_gc()
        context.set_foreground(color)
        context.set_alpha(alpha)
        if inside is not None:
            context.set_clip_rectangle(Bbox.from_extents(*inside))
        return context

    def _draw(self, context: Any, xs: Any, ys: Any, face: Any) -> None:
        import numpy as np
        from matplotlib.path import Path
        from matplotlib.transforms import IdentityTransform

        path = Path(np.column_stack([np.asarray(xs, float), np.asarray(ys, float)]))
        self._renderer.draw_path(context, path, IdentityTransform(), face)


def _font(size: float, is_bold: bool) -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=[FONT], size=size, weight="bold" if is_bold else "normal")
