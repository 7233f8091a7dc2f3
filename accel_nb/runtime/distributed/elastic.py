"""Reporting of a rank's error to torch's elastic agent, which supervises the ranks of several machines."""

from __future__ import annotations


def record_failure(error: BaseException) -> None:
    """Write the error to the agent's error file, so that it reports the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
