"""Progress bars, one for all ranks of a machine."""

from __future__ import annotations

import importlib
from typing import Any

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.current_world import current_world


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a tqdm bar for a notebook or a terminal; it is disabled on all but the first rank of a machine.

    Takes the arguments of tqdm. ``main_process_only=False`` draws one bar for each rank. Raises `MisuseError` if tqdm
    is not installed.
    """
    try:
        auto = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise MisuseError("progress bars need the package tqdm: pip install tqdm") from error
    if main_process_only and not current_world().is_local_main:
        kwargs["disable"] = True
    return auto.tqdm(*args, **kwargs)
