"""Terminal colors for status words in the output of commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

from accel_nb.runtime.process.environment import get_variable

_GREEN, _YELLOW, _RED, _BLUE = 32, 33, 31, 36
STATUS_COLORS: Mapping[str, int] = MappingProxyType(
    {
        "ok": _GREEN,
        "done": _GREEN,
        "fits": _GREEN,
        "note": _BLUE,
        "running": _BLUE,
        "WARN": _YELLOW,
        "LEFT": _YELLOW,
        "interrupted": _YELLOW,
        "not run": _YELLOW,
        "FAILED": _RED,
        "failed": _RED,
    }
)
"""The color of each status word, as an SGR parameter."""
_MARK = re.compile(rf"(?m)(^\[ *|  )({'|'.join(STATUS_COLORS)})(?=\]|  |$)")


def colorize(text: str, stream: TextIO) -> str:
    """Return the text with colored status words if the stream is a terminal that supports colors, else unchanged.

    A status word is one of `STATUS_COLORS` in brackets at the start of a line, or as a column. Respects ``NO_COLOR``.
    """
    if not stream.isatty() or get_variable("NO_COLOR", "") or get_variable("TERM", "") == "dumb":
        return text
    return _MARK.sub(lambda match: f"{match[1]}\x1b[{STATUS_COLORS[match[2]]}m{match[2]}\x1b[0m", text)
