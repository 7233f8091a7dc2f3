"""Restarts of a cell on new workers after a worker has died or raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from accel_nb.config import Layer, Resolved, resolve
from accel_nb.errors import ConfigError, NoCheckpoint, ShippingError
from accel_nb.notebook.session.error_translation import is_option_timeout
from accel_nb.notebook.session.run_state import Cell
from accel_nb.notebook.session.session import Session
from accel_nb.pool.engine import WorkerSpec


def require_checkpoint(resolved: Resolved) -> None:
    """Raise NoCheckpoint if the checkpoint to resume from does not exist; ``auto`` does not require one."""
    location = resolved.config.checkpoint.resume
    if location is None or location == "auto":
        return
    from accel_nb.checkpoint.discovery import find_checkpoints

    try:
        find_checkpoints(location)
    except NoCheckpoint as error:
        if os.path.isdir(location):
            return  # it may be another library's checkpoint, which the workers detect
        raise NoCheckpoint(f"checkpoint.resume from {resolved.origins['checkpoint.resume']}: {error}") from None


def run_with_restarts(
    session: Session, cell: Cell, resolved: Resolved, specs: Sequence[WorkerSpec], *, mode: str
) -> list[Any]:
    """Run a cell, and up to ``max_restarts`` times again if it fails. Return and raise as `Session.run`.

    Each try has new workers with the notebook's values, and resumes from the newest checkpoint if ``checkpoint.dir`` is
    set. Only the last try changes the notebook if it fails. An interrupt, a timeout and errors in the cell's options or
    values are raised at once, since another try would end the same way.
    """
    for num_left in range(resolved.config.max_restarts, -1, -1):
        try:
            return session.run(cell, resolved, specs, mode=mode, is_last_try=num_left == 0)
        except (ShippingError, ConfigError):
            raise
        except Exception as error:
            if num_left == 0 or is_option_timeout(error):
                raise
            folder = resolved.config.checkpoint.dir
            where = "from the start: no checkpoint.dir is set"
            if folder is not None:
                where = f"from the newest checkpoint in {folder}, if there is one"
            first = str(error).partition("\n")[0]
            print(f"{type(error).__name__}: {first}\nrestarting {where}; {num_left - 1} left", file=sys.stderr)
            session.discard_workers()
            if resolved.config.engine.kind != "local":
                specs = session.assign_workers(resolved.config)  # a node may be lost
            if folder is not None:
                restart = f"restart {resolved.config.max_restarts - num_left + 1}"
                resolved = resolve([*resolved.layers, Layer("flags", {"checkpoint.resume": "auto"}, restart)])
    raise AssertionError("the last try returns or raises")
