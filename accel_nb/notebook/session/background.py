"""Cells that run in the background: a thread waits for the workers while the notebook runs other cells.

The thread writes into the cell's own output and does not touch the notebook's namespace. The main thread applies the
results between two cells, or in ``wait``.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_nb.errors import PoolError
from accel_nb.notebook.messages import RankAnswer
from accel_nb.notebook.output.cell_output import CellOutput
from accel_nb.notebook.session.run_state import CellRun, RunStatus, status_of
from accel_nb.pool.control.stop_escalation import RankResult, Reason
from accel_nb.telemetry.actions import StopAfterStep
from accel_nb.telemetry.events import Event

_INTERRUPT_INTERVAL_S = 2.5
"""How long `BackgroundRun.interrupt_until_ended` waits after one interrupt before it sends the next."""


class BackgroundRun:
    """A cell that runs in the background.

    Its results (names that it binds, models that it trains) are applied to the notebook after it has ended: at the
    start of the next cell, or in `wait` and `result`.
    """

    def __init__(
        self,
        running: CellRun,
        namespace: Mapping[str, Any],
        values_at_start: Mapping[str, Any],
        execute: Callable[[BackgroundOutput], tuple[list[RankAnswer], Reason | None]],
        determine_error: Callable[[list[RankAnswer], Reason | None], BaseException | None],
        apply_results: Callable[[], object],
        on_end: Callable[[BaseException | None], object],
    ) -> None:
        self.running = running
        self.values_at_start = values_at_start
        """The values of the names that notebook and workers share, as of the start of the run."""
        self.answers: list[RankAnswer] = []
        self.error: BaseException | None = None
        # Whether the results have been applied to the notebook.
        self.are_results_applied = False
        self._execute = execute
        self._determine_error = determine_error
        self._apply_results = apply_results
        self._on_end = on_end
        self._namespace = namespace
        self._output = BackgroundOutput(running.output)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="accel_nb background run", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{self.status()} · wait(), result(), stop(), interrupt(), attach(), status()>"

    @property
    def is_running(self) -> bool:
        """Whether the workers still run it; its output may be completed a little later."""
        return not self._has_ended.is_set()

    def join(self) -> None:
        """Wait until the output of an ended run is complete."""
        self._thread.join()

    def status(self) -> str:
        """Return one line with title, state and run time."""
        running = self.running
        state = "running" if self.is_running else running.status
        return f"run {running.title!r} in the background: {state}, {running.elapsed_s:.1f} s"

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end, apply the results to the notebook, and return the final status.

        Raise the cell's error, except for an interrupt, and TimeoutError when it still runs after ``timeout_s``
        seconds. An interrupt of the notebook ends the wait, not the run.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.status()}: it still runs after {timeout_s:g} s; wait() again, or stop() it")
        self._apply_results()
        if self.error is not None and self.running.status == "failed":
            raise self.error
        return self.running.status

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait as `wait` does, and return the notebook's values of the names that the cell binds."""
        self.wait(timeout_s)
        return {name: self._namespace[name] for name in self.running.names.bound if name in self._namespace}

    def stop(self) -> None:
        """Stop the cell after the current step; it counts as done. Returns at once."""
        self.running.controls.request(StopAfterStep())

    def interrupt(self) -> None:
        """Interrupt it at any point of its code. Returns at once."""
        self.running.controls.interrupt()

    def attach(self) -> None:
        """Show its output so far in the running cell, and further output there as well."""
        self._output.move_to_running_cell()

    def interrupt_until_ended(self) -> None:
        """Interrupt it repeatedly until it has ended; ranks that do not stop are killed."""
        while self.is_running:
            self.interrupt()
            self._thread.join(_INTERRUPT_INTERVAL_S)

    def _work(self) -> None:
        try:
            self.answers, reason = self._execute(self._output)
            self.error = self._determine_error(self.answers, reason)
        except BaseException as error:
            self.error = error if isinstance(error, Exception) else PoolError(f"the run ended with {error!r}")
        self._has_ended.set()
        status = status_of(self.error)
        if status == "failed":
            first = (str(self.error).splitlines() or [""])[0]
            self.running.closing_lines.append(f"{type(self.error).__name__}: {first} · `%accelerate wait` raises it")
        try:
            self._output.finish(self.running, status)
        finally:
            self._on_end(self.error)


class BackgroundOutput:
    """A pool listener that writes a cell's output from another thread into the cell to which it belongs."""

    def __init__(self, output: CellOutput) -> None:
        self._output = output
        self._context = contextvars.copy_context()  # ipykernel stores in it the cell that owns the output
        self._lock = threading.RLock()

    def move_to_running_cell(self) -> None:
        """Show the output so far in the running cell, and write further output there."""
        with self._lock:
            self._output.show_again()
            self._context = contextvars.copy_context()

    def finish(self, running: CellRun, status: RunStatus) -> None:
        """Complete the output."""
        self._run_in_cell(running.finish, status)

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Forward text that a rank wrote."""
        self._run_in_cell(self._output.on_output, rank, stream, data)

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Forward a message."""
        self._run_in_cell(self._output.on_message, rank, topic, body)

    def on_events(self, events: Sequence[Event]) -> None:
        """Forward measurements."""
        self._run_in_cell(self._output.on_events, events)

    def on_result(self, answer: RankResult) -> None:
        """Forward the answer of a rank."""
        self._run_in_cell(self._output.on_result, answer)

    def tick(self) -> None:
        """Redraw the output if it is due."""
        self._run_in_cell(self._output.tick)

    def _run_in_cell(self, action: Callable[..., object], *values: Any) -> None:
        with self._lock:
            self._context.run(action, *values)
