"""SIGTERM while a run in the background saves: the run is notified at once, the process ends after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from accel_nb.notebook.session.background import BackgroundRun
from accel_nb.notebook.session.interrupts import DeferredTermination, count_interrupts


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


def test_an_interrupt_after_a_request_leaves_no_handler_in_place(received: list[int], monkeypatch: pytest.MonkeyPatch):
    before, install = signal.getsignal(signal.SIGTERM), signal.signal
    # A process that a shell has started in the background ignores interrupts.
    interrupt_before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def restore(number: int, handler: Any) -> Any:
        replaced = install(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)
        return replaced

    monkeypatch.setattr(signal, "signal", restore)
    with pytest.raises(KeyboardInterrupt), count_interrupts(terminations=True):
        signal.raise_signal(signal.SIGINT)
    install(signal.SIGINT, interrupt_before)
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


class UnshowableRun:
    """A run in the background whose output cannot be completed."""

    output = None

    def __init__(self) -> None:
        self.closing_lines: list[str] = []

    def finish(self, status: str) -> None:
        raise OSError("the front end is gone")


def test_the_end_of_a_background_run_is_reported_also_if_its_output_cannot_be_completed(monkeypatch):
    ended, raised = list[Any](), list[Any]()
    monkeypatch.setattr(threading, "excepthook", lambda info: raised.append(info.exc_type))
    run: Any = UnshowableRun()
    background = BackgroundRun(run, {}, {}, lambda output: ([], None), lambda answers, reason: None, list, ended.append)
    background.join()
    assert (ended, raised) == ([None], [OSError])
