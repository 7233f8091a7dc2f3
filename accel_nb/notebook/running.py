"""One cell on its way through the workers: what goes out, what it shows, and what may be asked of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_nb.notebook.cell import CellNames
from accel_nb.notebook.controls import Controls
from accel_nb.notebook.output import CellOutput
from accel_nb.pool.arena import Parcel
from accel_nb.pool.pool import POLL_S, Pool

RunStatus = Literal["running", "done", "interrupted", "failed"]


@dataclass(slots=True)
class Shipment:
    """What goes to the workers, ready to be sent."""

    pool: Pool
    bodies: Mapping[int, dict[str, Any]]
    sent: list[str]
    parcel: Parcel | None
    poll_s: float = POLL_S


@dataclass(slots=True)
class Running:
    """One run, from the first line of its output to the last."""

    title: str
    names: CellNames
    output: CellOutput
    controls: Controls
    timeout_s: float | None
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
