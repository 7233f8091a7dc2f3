"""A flag that any rank may set, and that all ranks read as set in the same check."""

from __future__ import annotations

from collections.abc import Callable

from accel_nb.runtime.distributed.communicator import Communicator


class Trigger:
    """A flag between ranks; see `Accelerator.check_trigger` for the guarantees.

    Flags are reduced in host memory, without a device synchronization. A set flag takes part in exactly one reduction,
    so exactly one check returns it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_set = False
        self._pending: Callable[[], bool] | None = None

    def set(self) -> None:
        """Set this rank's flag, without communication."""
        self._is_set = True

    def check(self, *, wait: bool) -> bool:
        """Return whether any rank's flag is set (``wait``), or was set at the previous check."""
        started = self._comm.start_any(self._is_set)
        self._is_set = False
        earlier, self._pending = self._pending, None if wait else started
        answer = False if earlier is None else earlier()
        return (started() or answer) if wait else answer
