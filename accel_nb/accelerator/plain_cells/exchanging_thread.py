"""The thread of a plain cell that exchanges values with other ranks: one at a time."""

from __future__ import annotations

import threading

from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError


class ExchangingThread:
    """The thread that computes with prepared models.

    Ranks make the same exchanges in the same order. Threads that run at once would make them in another order on each
    rank. One that ends before the next one begins, or that the main thread waits for, keeps the order.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.refusal: MisuseError | None = None
        """Why the cell is refused; a thread may end by this error without the main thread's notice."""
        self.begin()

    def begin(self) -> None:
        """Begin a cell."""
        self.refusal = None
        self._thread = threading.main_thread()
        self._number = self._thread.ident

    def require(self) -> None:
        """Raise `MisuseError` if another thread than the main one, which has computed with models, still runs."""
        if self._number != threading.get_ident() or self.refusal is not None:
            self._change()

    def _change(self) -> None:
        if self._stepper.world.size == 1 or self._stepper.is_inside_backward:  # torch has threads of its own
            return
        last, now = self._thread, threading.current_thread()
        if self.refusal is None and last is not now and last is not threading.main_thread() and last.is_alive():
            self.refusal = MisuseError(_AT_ONCE)
        if self.refusal is not None:
            raise self.refusal
        self._thread, self._number = now, now.ident


_AT_ONCE = (
    "several threads of this cell compute with models at once: the workers exchange values in the order of these "
    "computations, which is another one on each worker. Train one model after another, end a thread (`join()`, "
    "`with ThreadPoolExecutor`) before the next one begins, or use one worker (`--cpus 1`, or `--gpus 1`)"
)
