"""The location of a rank's main thread, read from another thread: the user's line and the last collective."""

from __future__ import annotations

import os
import sys
import traceback
import types
from typing import TYPE_CHECKING

from accel_nb.installed_files import is_of_library
from accel_nb.pool.messages import RankLocation

if TYPE_CHECKING:
    from accel_nb.runtime.distributed.process_group import DefaultGroup

_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")
_WAITING_PATHS = (os.path.join("torch", "distributed", ""), os.path.join("torch", "autograd", ""))


def location_of(thread: int, group: DefaultGroup, *, has_ended: bool = False) -> RankLocation:
    """Return the location of a thread of this process: the user's line, and the last collective that it entered.

    ``has_ended`` states whether the request has ended on this rank.
    """
    stack = _stack_of(thread)
    user_frames = [entry for entry in stack if not _is_of_library(entry.filename)]
    current = (user_frames or stack or [traceback.FrameSummary("?", 0, "?")])[-1]
    last = group.last_collective()
    is_open = last is not None and last.is_open
    return RankLocation(
        file="the cell" if current.filename.startswith("<ipython") else current.filename,
        line=current.lineno,
        text=(current.line or current.name)[:200],
        is_waiting=is_open or any(part in entry.filename for entry in stack[-6:] for part in _WAITING_PATHS),
        group=None if last is None else last.group,
        channel=None if last is None else last.channel,
        sequence=None if last is None else last.sequence,
        operation=None if last is None else last.operation,
        sizes=None if last is None else last.sizes,
        is_open=is_open,
        includes_all_ranks=last is not None and last.includes_all_ranks,
        entered={} if last is None else last.entered,
        has_ended=has_ended,
    )


def _is_of_library(file: str) -> bool:
    return file.startswith(_OWN_FOLDER) or is_of_library(file)


def _stack_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the frames of a running thread, the outermost first.

    The loop does nothing else, so that the thread does not run meanwhile: Python 3.11 may crash in the frame that
    follows one which the thread has left, and `traceback.extract_stack` reads source files between two frames.
    """
    lines: list[tuple[types.CodeType, int]] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return [
        traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
        for code, line in reversed(lines)
    ]
