"""SIGTERM while a run in the background saves: the run is notified at once, the process ends after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from accel_nb.notebook.session.interrupts import DeferredTermination


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Return a list that grows when SIGTERM takes effect in this process."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_deferred_until_the_run_ends(received: list[int]):
    before, asked = signal.getsignal(signal.SIGTERM), list[Any]()
    held = DeferredTermination(lambda: asked.append(1))
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert (asked, received) == ([1], [])
    ending = threading.Thread(target=held.run_ended)  # the thread of the run
    ending.start()
    ending.join()
    assert (asked, received) == ([1], [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is before


def test_release_restores_the_previous_handler(received: list[int]):
    before = signal.getsignal(signal.SIGTERM)
    held = DeferredTermination(lambda: None)
    held.run_ended()
    signal.raise_signal(signal.SIGTERM)  # between the run's end and the next cell
    assert received == [signal.SIGTERM]
    held = DeferredTermination(lambda: None)
    held.run_ended()
    held.release()
    assert signal.getsignal(signal.SIGTERM) is before
    elsewhere = threading.Thread(target=lambda: DeferredTermination(lambda: None).release())
    elsewhere.start()
    elsewhere.join()
    assert signal.getsignal(signal.SIGTERM) is before
