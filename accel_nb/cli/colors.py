"""Colours for the words that say how something is, where a person reads them on a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

from accel_nb.runtime.process.environment import variable

_GREEN, _YELLOW, _RED, _BLUE = 32, 33, 31, 36
MARKS: Mapping[str, int] = MappingProxyType(
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
"""The words that commands mark lines with, each with its SGR colour."""
_MARK = re.compile(rf"(?m)(^\[ *|  )({'|'.join(MARKS)})(?=\]|  |$)")


def for_terminal(text: str, stream: TextIO) -> str:
    """Return the text with its marks in colour if the stream is a terminal that shows them, else as it is.

    A mark is one of `MARKS` that stands alone: in brackets at a line's begin, or as a column. ``NO_COLOR`` is heard.
    """
    if not stream.isatty() or variable("NO_COLOR", "") or variable("TERM", "") == "dumb":
        return text
    return _MARK.sub(lambda found: f"{found[1]}\x1b[{MARKS[found[2]]}m{found[2]}\x1b[0m", text)
