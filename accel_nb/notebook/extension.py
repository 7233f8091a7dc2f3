"""The entry points of ``%load_ext accel_nb``. The magics are imported only where workers can run."""

from __future__ import annotations

from typing import Any

from accel_nb.errors import PoolError
from accel_nb.runtime.process.system import why_no_workers


def load_ipython_extension(shell: Any) -> None:
    """Register the magics, as `magics.load_ipython_extension` does; raise `PoolError` on other systems than Linux."""
    if (why := why_no_workers()) is not None:
        raise PoolError(why)
    from accel_nb.notebook import magics

    magics.load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the workers and remove the magics; do nothing if they are not loaded."""
    if why_no_workers() is None:
        from accel_nb.notebook import magics

        magics.unload_ipython_extension(shell)
