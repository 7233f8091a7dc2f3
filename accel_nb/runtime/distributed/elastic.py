"""Reporting of a rank's error to torch's elastic agent, which supervises the ranks of several machines."""

from __future__ import annotations

from accel_nb.errors import error_text


def record_failure(error: BaseException) -> None:
    """Write the error to the agent's error file, so that it reports the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        str(error)  # torch writes it
    except Exception:  # an error of the user's class may have no text
        error = RuntimeError(f"{type(error).__name__}: {error_text(error)}").with_traceback(error.__traceback__)
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
