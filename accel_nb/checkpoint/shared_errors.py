"""Operations on files whose error on one rank is raised on every rank, so that no rank waits for one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator

T = TypeVar("T")


def run_on_main(comm: Communicator, write: Callable[[], object]) -> None:
    """Run a function on rank 0 while the others wait; every rank must call.

    Its error is raised on rank 0, and `CheckpointError` with its text on the others.
    """
    problem: Exception | None = None
    if comm.world.is_main:
        try:
            write()
        except Exception as error:  # raised on every rank below
            problem = error
    reported = comm.broadcast_json(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if reported is not None:
        raise CheckpointError(f"rank 0: {reported}")


def run_on_all(comm: Communicator, read: Callable[[], T]) -> T:
    """Run a function on every rank and return its result on this one; every rank must call.

    An error is raised on the ranks that have one, and `CheckpointError` with the text of the first on the others.
    """
    problem: Exception | None = None
    found: T | None = None
    try:
        found = read()
    except Exception as error:  # raised on every rank below
        problem = error
    reported = comm.all_gather_json(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(reported):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return found  # pyright: ignore[reportReturnType]
