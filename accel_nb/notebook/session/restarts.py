"""Running a cell again, on fresh workers, when one of them has died or raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from accel_nb.config import Layer, Resolved, resolve
from accel_nb.errors import ConfigError, NoCheckpoint, ShippingError
from accel_nb.notebook.session.run_state import Cell
from accel_nb.notebook.session.session import Session
from accel_nb.pool.engine import WorkerSpec


def require_checkpoint(resolved: Resolved) -> None:
    """Raise NoCheckpoint where a run is to go on from a checkpoint that is not there; ``auto`` may find none."""
    wanted = resolved.config.checkpoint.resume
    if wanted is None or wanted == "auto":
        return
    from accel_nb.checkpoint.discovery import locate

    try:
        locate(wanted)
    except NoCheckpoint as error:
        if os.path.isdir(wanted):
            return  # the workers look closer: it may be a folder of another library, of which they say how it is read
        raise NoCheckpoint(f"checkpoint.resume from {resolved.origins['checkpoint.resume']}: {error}") from None


def run_with_restarts(
    session: Session, cell: Cell, resolved: Resolved, specs: Sequence[WorkerSpec], *, mode: str
) -> list[Any]:
    """Run a cell, and again while it fails and ``max_restarts`` allows; returns and raises as `Session.run`.

    Each try has workers of its own with the notebook's values, and goes on from the newest checkpoint if there is a
    folder for them. Nothing comes back from a try that has failed but the last. An interrupt, a timeout and what is
    wrong with the cell's options or values end it at once: another try would end alike.
    """
    for num_left in range(resolved.config.max_restarts, -1, -1):
        try:
            return session.run(cell, resolved, specs, mode=mode, is_last_try=num_left == 0)
        except (ShippingError, TimeoutError, ConfigError):
            raise
        except Exception as error:
            if num_left == 0:
                raise
            folder = resolved.config.checkpoint.dir
            where = "from the start: no checkpoint.dir is set" if folder is None else f"from what is in {folder}"
            first = str(error).partition("\n")[0]
            print(f"{type(error).__name__}: {first}\nrestarting {where}; {num_left - 1} left", file=sys.stderr)
            session.renew()
            if folder is not None:
                restart = f"restart {resolved.config.max_restarts - num_left + 1}"
                resolved = resolve([*resolved.layers, Layer("flags", {"checkpoint.resume": "auto"}, restart)])
    raise AssertionError("the last try returns or raises")
