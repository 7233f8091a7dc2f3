"""Cells that run in the background: a thread waits for the workers, and the notebook goes on.

The thread shows what the cell puts out where the cell is, and touches none of the notebook's names. What comes back is
taken in between two cells, or inside of ``wait``, by the notebook's own thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_nb.errors import PoolError
from accel_nb.notebook.output.cell_output import CellOutput
from accel_nb.notebook.session.run_state import Running, RunStatus, status_of
from accel_nb.pool.control.stop_escalation import Answer, Reason
from accel_nb.telemetry.actions import StopAfterStep
from accel_nb.telemetry.events import Event

_END_TURN_S = 2.5
"""How long a run that is to end may take to obey one interrupt before it gets the next."""


class BackgroundRun:
    """A cell that runs in the background.

    What it binds and trains comes back when it has ended: at the start of the next cell, or in `wait` and `result`.
    """

    def __init__(
        self,
        running: Running,
        namespace: Mapping[str, Any],
        held: Mapping[str, Any],
        execute: Callable[[PlacedOutput], tuple[list[Answer], Reason | None]],
        judge: Callable[[list[Answer], Reason | None], BaseException | None],
        arrive: Callable[[], object],
        ended: Callable[[BaseException | None], object],
    ) -> None:
        self.running = running
        self.held = held
        """What the names that the workers share with the notebook held when it began."""
        self.answers: list[Answer] = []
        self.error: BaseException | None = None
        # Whether what came back is in the notebook.
        self.has_arrived = False
        self._execute = execute
        self._judge = judge
        self._arrive = arrive
        self._ended = ended
        self._namespace = namespace
        self._output = PlacedOutput(running.output)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="accel_nb background run", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{self.status()} · wait(), result(), stop(), interrupt(), attach(), status()>"

    @property
    def is_running(self) -> bool:
        """Whether the workers are busy with it; its last picture may be drawn after that."""
        return not self._is_over.is_set()

    def join(self) -> None:
        """Wait until the output of a run that is over is complete."""
        self._thread.join()

    def status(self) -> str:
        """Return one line: what it is, how it goes, for how long."""
        running = self.running
        state = "running" if self.is_running else running.status
        return f"run {running.title!r} in the background: {state}, {running.elapsed_s:.1f} s"

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end, bring back what the cell has bound and trained, and return how it ended.

        Raises what the cell raised, but not for an interrupt, and TimeoutError when it still runs after
        ``timeout_s``. An interrupt of the notebook ends the waiting only.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.status()}: it still runs after {timeout_s:g} s; wait() again, or stop() it")
        self._arrive()
        if self.error is not None and self.running.status == "failed":
            raise self.error
        return self.running.status

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait as `wait` does, and return what the notebook holds under the names that the cell binds."""
        self.wait(timeout_s)
        return {name: self._namespace[name] for name in self.running.names.bound if name in self._namespace}

    def stop(self) -> None:
        """Have it end after the step, as a finished cell; returns at once."""
        self.running.controls.ask(StopAfterStep())

    def interrupt(self) -> None:
        """Interrupt it, wherever its ranks are; returns at once."""
        self.running.controls.interrupt()

    def attach(self) -> None:
        """Show it here: what it has put out so far, and, while it runs, what follows."""
        self._output.move_here()

    def end(self) -> None:
        """Interrupt it until it has ended; its ranks are killed where nothing else helps."""
        while self.is_running:
            self.interrupt()
            self._thread.join(_END_TURN_S)

    def _work(self) -> None:
        try:
            self.answers, reason = self._execute(self._output)
            self.error = self._judge(self.answers, reason)
        except BaseException as error:
            self.error = error if isinstance(error, Exception) else PoolError(f"the run ended with {error!r}")
        self._is_over.set()
        status = status_of(self.error)
        if status == "failed":
            first = (str(self.error).splitlines() or [""])[0]
            self.running.lines.append(f"{type(self.error).__name__}: {first} · `%accelerate wait` raises it")
        self._output.finish(self.running, status)
        self._ended(self.error)


class PlacedOutput:
    """A cell's output that is written from another thread, into the cell that it belongs to; a pool's listener."""

    def __init__(self, output: CellOutput) -> None:
        self._output = output
        self._context = contextvars.copy_context()  # holds which cell is the running one
        self._lock = threading.RLock()

    def move_here(self) -> None:
        """Show all there is in the running cell, and from now on what follows."""
        with self._lock:
            self._output.redraw()
            self._context = contextvars.copy_context()

    def finish(self, running: Running, status: RunStatus) -> None:
        """Complete the output."""
        self._do(running.finish, status)

    def printed(self, rank: int, stream: str, data: bytes) -> None:
        """Pass on what a rank wrote."""
        self._do(self._output.printed, rank, stream, data)

    def noted(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Pass on a note."""
        self._do(self._output.noted, rank, topic, body)

    def measured(self, events: Sequence[Event]) -> None:
        """Pass on numbers."""
        self._do(self._output.measured, events)

    def answered(self, answer: Answer) -> None:
        """Pass on how a rank ended."""
        self._do(self._output.answered, answer)

    def tick(self) -> None:
        """Draw, if it is time."""
        self._do(self._output.tick)

    def _do(self, action: Callable[..., object], *values: Any) -> None:
        with self._lock:
            self._context.run(action, *values)
