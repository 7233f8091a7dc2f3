"""The engines of a notebook's session: workers that run cells, on the engine that the options name."""

from __future__ import annotations

from collections.abc import Mapping

from accel_nb.config.engine_section import EngineOptions
from accel_nb.pool.engine import Engine, EngineRequest
from accel_nb.pool.registry import find_engine

PROGRAM = "accel_nb.notebook.worker.program:CellProgram"
PRELOAD = ("torch._dynamo", "accel_nb.notebook.worker.program:warm")
"""Modules and a function to load before workers are forked; torch imports the first when an optimizer is made."""


def start_engine(options: EngineOptions, overrides: Mapping[str, str]) -> Engine:
    """Start the engine that ``options`` name; ``overrides`` replace environment variables of the notebook."""
    return find_engine(options.kind)(EngineRequest(PROGRAM, PRELOAD, options, overrides))
