"""The user's interrupts, and the end that the system announces, while a cell runs on the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Presses:
    """How often the user has interrupted so far."""

    def __init__(self) -> None:
        self.count = 0
        # SIGTERM came: this process is to end.
        self.is_to_end = False

    def __call__(self) -> int:
        """Return the count."""
        return self.count


@contextmanager
def counted_interrupts(*, terminations: bool = False) -> Iterator[Presses]:
    """Count interrupts inside of the block instead of raising, so that no message is torn apart by one.

    With ``terminations`` SIGTERM is noted too, and counts as the first interrupt; whoever asked for that has to raise
    it again. The kernel's own handlers are back in place when the block ends. Outside of the main thread, where Python
    allows no handlers, nothing is counted.
    """
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return

    def count(signum: int, frame: object) -> None:
        presses.count += 1

    def end(signum: int, frame: object) -> None:
        presses.is_to_end = True
        presses.count = max(presses.count, 1)

    handlers = {signal.SIGINT: count, **({signal.SIGTERM: end} if terminations else {})}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HeldTermination:
    """SIGTERM, held back while a run in the background is told of it; it takes effect when that run has ended.

    Made in the main thread; in others, where Python allows no handlers, nothing is held back. ``ask`` is called in the
    handler, once for all SIGTERMs.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._has_come = False
        self._is_over = False
        self._is_held = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGTERM, self._take) if self._is_held else None

    def run_ended(self) -> None:
        """Let a SIGTERM that has come take effect in the main thread; may be called in any thread."""
        self._is_over = True  # first: one that comes between these lines must not be lost
        if self._has_come:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def release(self) -> None:
        """Put back what was in place before; in the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_held and is_main and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
            self._is_held = False

    def _take(self, signum: int, frame: object) -> None:
        is_first, self._has_come = not self._has_come, True
        if self._is_over:
            self.release()
            signal.raise_signal(signal.SIGTERM)
        elif is_first:
            self._ask()
