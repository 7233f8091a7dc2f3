"""The state of one run of a cell: the cell, the values for the workers, its output and its controls."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_nb.config import Config
from accel_nb.notebook.cells.call import FunctionCall
from accel_nb.notebook.cells.cell_analysis import CellNames
from accel_nb.notebook.output.cell_output import CellOutput
from accel_nb.notebook.session.run_controls import RunControls
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.payload import Payload
from accel_nb.pool.pool import POLL_S, Pool

RunStatus = Literal["running", "done", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell to run: its source and syntax tree, without magics; or a call that runs in place of a cell."""

    source: str
    tree: ast.Module
    execution_count: int
    call: FunctionCall | None = None
    flags: int = 0
    """Compiler flags of the scripts in it, in addition to those of its own code."""


@dataclass(slots=True)
class PackedCell:
    """A cell with the values that it needs, packed for the workers."""

    pool: Pool
    bodies: Mapping[int, dict[str, Any]]
    sent_paths: list[str]
    """Paths of the objects whose values are sent."""
    removed_names: tuple[str, ...]
    """Names that are deleted on the workers."""
    unreturned_names: tuple[str, ...]
    """Names that the cell binds and that are not returned to the notebook."""
    payloads: Mapping[str, Payload]
    poll_s: float = POLL_S


@dataclass(slots=True)
class CellRun:
    """One run of a cell, from the first line of its output to the last."""

    title: str
    names: CellNames
    output: CellOutput
    controls: RunControls
    config: Config
    specs: Sequence[WorkerSpec]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    closing_lines: list[str] = field(default_factory=list)
    """Lines to show below the cell's output when it has ended."""
    status: RunStatus = "running"

    @property
    def elapsed_s(self) -> float:
        """The run time so far, or in total after the end."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    def finish(self, status: RunStatus) -> None:
        """Record the end and complete the output."""
        self.controls.requests.close()
        self.status, self.ended = status, time.monotonic()
        self.output.finish(status, self.closing_lines)


def status_of(error: BaseException | None) -> RunStatus:
    """Return the final status of a run; ``error`` is the error that it raised, or None."""
    return "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
