"""One flag for all ranks: any may set it, and all learn of it at the same check."""

from __future__ import annotations

from collections.abc import Callable

from accel_nb.runtime.distributed.communicator import Communicator


class Trigger:
    """A flag between ranks; see `Accelerator.check_trigger` for what users are promised.

    Ranks compare flags on their hosts, so that no device is waited for. A set flag takes part in exactly one
    comparison, and so is answered exactly once.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_set = False
        self._pending: Callable[[], bool] | None = None

    def set(self) -> None:
        """Set this rank's flag; sends nothing."""
        self._is_set = True

    def check(self, *, wait: bool) -> bool:
        """Compare flags: now, or by the comparison that the check before has started."""
        started = self._comm.start_any(self._is_set)
        self._is_set = False
        earlier, self._pending = self._pending, None if wait else started
        answer = False if earlier is None else earlier()
        return (started() or answer) if wait else answer
