"""SIGTERM while a run in the background saves: told at once, obeyed when the run has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from accel_nb.notebook.session.interrupts import HeldTermination


@pytest.fixture
def obeyed() -> Iterator[list[int]]:
    """Return a list that grows when SIGTERM takes effect in this process."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_termination_waits_for_the_end_of_the_run(obeyed: list[int]):
    before, asked = signal.getsignal(signal.SIGTERM), list[Any]()
    held = HeldTermination(lambda: asked.append(1))
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert (asked, obeyed) == ([1], [])
    ending = threading.Thread(target=held.run_ended)  # the thread of the run
    ending.start()
    ending.join()
    assert (asked, obeyed) == ([1], [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_a_termination_nothing_stays(obeyed: list[int]):
    before = signal.getsignal(signal.SIGTERM)
    held = HeldTermination(lambda: None)
    held.run_ended()
    signal.raise_signal(signal.SIGTERM)  # between the run's end and the next cell
    assert obeyed == [signal.SIGTERM]
    held = HeldTermination(lambda: None)
    held.run_ended()
    held.release()
    assert signal.getsignal(signal.SIGTERM) is before
    elsewhere = threading.Thread(target=lambda: HeldTermination(lambda: None).release())
    elsewhere.start()
    elsewhere.join()
    assert signal.getsignal(signal.SIGTERM) is before
