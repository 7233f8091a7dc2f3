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

    def __call__(self) -> int:
        """Return the count."""
        return self.count


@contextmanager
def counted_interrupts() -> Iterator[Presses]:
    """Count interrupts inside of the block instead of raising, so that no message is torn apart by one.

    The kernel's own handler is back in place when the block ends. Outside of the main thread, where Python allows no
    handlers, nothing is counted.
    """
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return

    def count(signum: int, frame: object) -> None:
        presses.count += 1

    before = signal.signal(signal.SIGINT, count)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
