"""Restarts of a cell on new workers after a worker has died or raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.config import Config, Layer, Resolved, resolve
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

    Each repeated try runs on new workers, which receive the notebook's values, and resumes from the newest checkpoint
    that the run has saved in ``checkpoint.dir``; before the first save it starts as the run did. Of failed tries only
    the last one changes the notebook. Errors in options, and of values that cannot be sent, are raised at once, since a
    repetition would fail in the same way; so are an interrupt and the end of the run by the option ``timeout``.
    """
    earlier = _list_checkpoints(resolved.config) if resolved.config.max_restarts else {}
    for num_left in range(resolved.config.max_restarts, -1, -1):
        try:
            return session.run(cell, resolved, specs, mode=mode, is_last_try=num_left == 0)
        except (ShippingError, ConfigError):
            raise
        except Exception as error:
            if num_left == 0 or is_option_timeout(error):
                raise
            session.discard_workers()
            resume = _find_resume(resolved.config, earlier)
            first = str(error).partition("\n")[0]
            where = _describe_start(resolved.config, resume)
            print(f"{type(error).__name__}: {first}\nrestarting {where}; {num_left - 1} left", file=sys.stderr)
            if resolved.config.engine.kind != "local":
                specs = session.assign_workers(resolved.config)  # a node may be lost
            if resume is not None:
                restart = f"restart {resolved.config.max_restarts - num_left + 1}"
                resolved = resolve([*resolved.layers, Layer("flags", {"checkpoint.resume": resume}, restart)])
    raise AssertionError("the last try returns or raises")


def _list_checkpoints(config: Config) -> dict[str, str] | None:
    """Return the ids of the checkpoints in ``checkpoint.dir`` by name, newest first.

    None if the folder is not on this machine: it may be on the nodes only.
    """
    from accel_nb.checkpoint.discovery import list_ids
    from accel_nb.checkpoint.store_url import open_store

    folder = config.checkpoint.dir
    if folder is None:
        return {}
    is_path = "://" not in folder
    if is_path and config.engine.kind != "local" and not os.path.isdir(os.path.expanduser(folder)):
        return None
    return list_ids(open_store(folder))


def _find_resume(config: Config, earlier: Mapping[str, str] | None) -> str | None:
    """Return the newest checkpoint that this run has saved, ``auto`` if that is unknown, or None if there is none.

    ``earlier`` are the checkpoints that were in the folder before the run: they may be another run's.
    """
    present = _list_checkpoints(config)
    if earlier is None or present is None:
        return "auto"
    saved = next((name for name, key in present.items() if earlier.get(name) != key), None)
    return None if saved is None else f"{str(config.checkpoint.dir).rstrip('/')}/{saved}"


def _describe_start(config: Config, resume: str | None) -> str:
    """Return from where a restart continues; ``resume`` is the checkpoint that it loads in place of the given one."""
    folder, given = config.checkpoint.dir, config.checkpoint.resume
    if resume == "auto" or (resume is None and given == "auto"):
        return f"from the newest checkpoint in {folder}, if there is one"
    if resume is not None:
        return f"from the newest checkpoint, {resume}"
    why = "no checkpoint.dir is set" if folder is None else f"this run has saved no checkpoint in {folder} yet"
    return f"{'from the start' if given is None else f'from {given}'}: {why}"
