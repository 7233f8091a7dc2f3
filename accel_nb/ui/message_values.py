"""Values from users and workers as messages to the browser may contain them."""

from __future__ import annotations

import math

from accel_nb.ui.messages import JsonNumber

MAX_TEXT = 256


def to_json_number(value: float | None) -> JsonNumber:
    """Return the number, or its name if it is NaN or infinite, which JSON cannot represent."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def cap_text(text: str, limit: int = MAX_TEXT) -> str:
    """Cut a text from a user or a worker to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
