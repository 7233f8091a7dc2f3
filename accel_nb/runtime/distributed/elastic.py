"""Telling torch's elastic agent, which watches the ranks of several machines, what a rank has raised."""

from __future__ import annotations


def record_failure(error: BaseException) -> None:
    """Write the error where the agent looks for it, so that it names the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
