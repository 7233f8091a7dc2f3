"""Handling of SIGINT and SIGTERM in the kernel while a cell runs on the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InterruptCount:
    """The number of interrupts so far, and whether SIGTERM arrived."""

    def __init__(self) -> None:
        self.count = 0
        # Whether SIGTERM arrived, so that this process must end.
        self.has_sigterm = False

    def __call__(self) -> int:
        """Return the count."""
        return self.count


@contextmanager
def count_interrupts(*, terminations: bool = False) -> Iterator[InterruptCount]:
    """Count interrupts inside the block instead of raising KeyboardInterrupt.

    An exception could leave a message between kernel and workers half written.

    With ``terminations``, SIGTERM is recorded too and counts as the first interrupt; the caller must raise it again
    after the block, when the previous handlers are restored. Outside the main thread, where Python allows no signal
    handlers, nothing is counted.
    """
    interrupts = InterruptCount()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def count(signum: int, frame: object) -> None:
        interrupts.count += 1

    def end(signum: int, frame: object) -> None:
        interrupts.has_sigterm = True
        interrupts.count = max(interrupts.count, 1)

    handlers = {signal.SIGINT: count, **({signal.SIGTERM: end} if terminations else {})}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield interrupts
    finally:
        for number, handler in reversed(before.items()):  # SIGINT last: it may raise as soon as it is restored
            signal.signal(number, handler)


class DeferredTermination:
    """Defers SIGTERM while a run in the background stops: the signal takes effect when that run has ended.

    Construct it in the main thread; in others, where Python allows no signal handlers, nothing is deferred.
    ``on_sigterm`` is called in the handler, at the first SIGTERM only.
    """

    def __init__(self, on_sigterm: Callable[[], object]) -> None:
        self._on_sigterm = on_sigterm
        self._has_arrived = False
        self._has_run_ended = False
        self._is_installed = threading.current_thread() is threading.main_thread()
        self._previous = signal.signal(signal.SIGTERM, self._handle) if self._is_installed else None

    def run_ended(self) -> None:
        """Raise a deferred SIGTERM in the main thread. Thread-safe."""
        self._has_run_ended = True  # set first: a SIGTERM that arrives between these lines must not be lost
        if self._has_arrived:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def release(self) -> None:
        """Restore the previous handler. Has an effect in the main thread only."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_installed and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
            self._is_installed = False

    def _handle(self, signum: int, frame: object) -> None:
        is_first, self._has_arrived = not self._has_arrived, True
        if self._has_run_ended:
            self.release()
            signal.raise_signal(signal.SIGTERM)
        elif is_first:
            self._on_sigterm()
