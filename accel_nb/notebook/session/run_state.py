"""One cell on its way through the workers: what goes out, what it shows, and what may be asked of it."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_nb.config import Config
from accel_nb.notebook.cells.call import Call
from accel_nb.notebook.cells.cell_analysis import CellNames
from accel_nb.notebook.output.cell_output import CellOutput
from accel_nb.notebook.session.run_controls import Controls
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.payload import Payload
from accel_nb.pool.pool import POLL_S, Pool

RunStatus = Literal["running", "done", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell to run: its text as the notebook has it, and that text as plain Python; or a call in place of a text."""

    source: str
    tree: ast.Module
    execution_count: int
    call: Call | None = None


@dataclass(slots=True)
class Shipment:
    """What goes to the workers, ready to be sent."""

    pool: Pool
    bodies: Mapping[int, dict[str, Any]]
    sent: list[str]
    """Paths that the workers will hold as the notebook does."""
    removed: tuple[str, ...]
    """Names that the workers will have no more."""
    unreturned: tuple[str, ...]
    """Names that the cell binds on the workers only."""
    payloads: Mapping[str, Payload]
    poll_s: float = POLL_S


@dataclass(slots=True)
class Running:
    """One run, from the first line of its output to the last."""

    title: str
    names: CellNames
    output: CellOutput
    controls: Controls
    config: Config
    specs: Sequence[WorkerSpec]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    lines: list[str] = field(default_factory=list)
    """What is said below the cell when it has ended."""
    status: RunStatus = "running"

    @property
    def elapsed_s(self) -> float:
        """How long it has run, or did."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    def finish(self, status: RunStatus) -> None:
        """Complete the output."""
        self.controls.wishes.close()
        self.status, self.ended = status, time.monotonic()
        self.output.finish(status, self.lines)


def status_of(error: BaseException | None) -> RunStatus:
    """Return how a run ended that raised this, or nothing."""
    return "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
