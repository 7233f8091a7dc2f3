"""Reports of errors that a cell has raised on a worker, with tracebacks of the cell's own code."""

from __future__ import annotations

import base64
import sys
from typing import Any

from accel_nb.errors import AccelNbError, error_text
from accel_nb.notebook.messages import ErrorReport
from accel_nb.notebook.worker.shell import (
    IPYTHON_FOLDER,
    PACKAGE_FOLDER,
    drop_frames,
    insert_omission_note,
    shortened_tracebacks,
)
from accel_nb.pool.sync.stream import pickling

_LARGE_BYTES = 1_000_000


def format_traceback(error: BaseException, formatter: Any) -> list[str]:
    """Format an error's traceback without the frames of this package and IPython, unless there are no others.

    ``formatter`` is the ``InteractiveTB`` of a shell.
    """
    if isinstance(error, AccelNbError):
        return error._render_traceback_()
    shown = drop_frames(error.__traceback__, (PACKAGE_FOLDER, IPYTHON_FOLDER))
    with shortened_tracebacks(error, shown or error.__traceback__) as (shown, num_left_out):
        # By default (tb_offset) it drops the outermost frame.
        lines = list(formatter.structured_traceback(type(error), error, shown, tb_offset=0))
    insert_omission_note(lines, num_left_out)
    return lines


def make_error_report(error: BaseException, lines: list[str], namespace: dict[str, Any]) -> ErrorReport:
    """Return the report of an error with the lines of its traceback, and the pickled error if that is possible."""
    try:
        stream, buffers = pickling.dump(error, namespace=namespace, shared={})
        pickled = base64.b64encode(stream).decode() if not buffers and len(stream) < _LARGE_BYTES else None
    except Exception:  # an error that cannot be pickled is reported by type, message and traceback
        pickled = None
    return ErrorReport(type(error).__qualname__, type(error).__module__, error_text(error), tuple(lines), pickled)


def describe_exit(error: SystemExit) -> str:
    """Return the message for a cell that raised SystemExit."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "argparse":
            return (
                f"argparse ended the cell, with exit code {error.code!r}: it reads sys.argv, which is the notebook's "
                f"({sys.argv!r}). Pass the arguments, as in parse_args([]), or set sys.argv"
            )
        trace = trace.tb_next
    return f"the cell called exit() with {error.code!r}; the workers keep running, `%accelerate stop` ends them"
