"""Counting the user's interrupts while a cell runs on the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
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
