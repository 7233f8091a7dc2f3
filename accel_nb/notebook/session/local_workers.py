"""The engine of a notebook's session: workers on this machine that run cells."""

from __future__ import annotations

from collections.abc import Mapping

from accel_nb.pool.engine import Engine
from accel_nb.pool.local.engine import LocalEngine

PROGRAM = "accel_nb.notebook.worker.program:CellProgram"
PRELOAD = ("torch._dynamo", "accel_nb.notebook.worker.program:warm")
"""Modules and a function to load before workers are forked; torch imports the first when an optimizer is made."""


def make_local_engine(overrides: Mapping[str, str]) -> Engine:
    """Start the process that workers are forked from; ``overrides`` replace environment variables of the notebook."""
    return LocalEngine(PROGRAM, preload=PRELOAD, overrides=overrides)
