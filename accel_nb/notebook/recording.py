"""Cells in the registry of runs: one that has trained is recorded when it has ended, from what its panel knows."""

from __future__ import annotations

import logging
import math
import time

from accel_nb.config import Resolved
from accel_nb.runs import Registry
from accel_nb.ui.view import PanelState

logger = logging.getLogger(__name__)

GIT_PATIENCE_S = 0.2


def record_run(
    source: str, resolved: Resolved, state: PanelState, duration_s: float, error: BaseException | None
) -> None:
    """Record a cell that has ended; one without steps or metrics, or without a panel, is none. Never raises."""
    if not state.has_data:
        return
    try:
        recording = Registry().begin(
            "cell",
            _first_line(source),
            resolved,
            name=state.title,
            started=time.time() - duration_s,
            git_patience_s=GIT_PATIENCE_S,
        )
        loss = state.facts()["loss"]
        metrics = {} if loss is None else {"loss": loss}
        metrics |= {name: value for name, value in state.metrics.items() if math.isfinite(value)}
        recording.end(
            "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed",
            error=None if error is None else f"{type(error).__name__}: {error}"[:2000],
            num_steps=state.num_steps,
            metrics=metrics,
            checkpoints=tuple(mark.text.removeprefix("saved to ") for mark in state.marks if mark.kind == "checkpoint"),
        )
    except Exception:
        logger.warning("the run is not recorded", exc_info=True)


def _first_line(source: str) -> str:
    """Return the first line of a cell that says something: not its magic, and no import."""
    lines = [line.strip() for line in source.splitlines()]
    said = [line for line in lines if line and not line.startswith(("#", "%", "import ", "from "))]
    return (said or lines or [""])[0][:200]
