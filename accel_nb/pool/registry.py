"""Registry of engines: each is one entry point of the group ``accel_nb.engines``.

Its value is a function that takes an `EngineRequest` and returns a started `Engine`.
"""

from __future__ import annotations

from functools import cache
from typing import cast

from accel_nb.config.installed import ENGINE_GROUP, installed_entry_points
from accel_nb.errors import ConfigError
from accel_nb.pool.engine import EngineFunction


@cache
def find_engine(kind: str) -> EngineFunction:
    """Return the function that starts an engine; raise ConfigError for a name that is not installed.

    The module of the engine is imported now.
    """
    points = {point.name: point for point in installed_entry_points(ENGINE_GROUP)}
    if kind not in points:
        known = ", ".join(sorted(points)) or "none: the package is not installed; run pip install -e ."
        raise ConfigError(f"engine {kind!r} is unknown; installed are {known}")
    return cast("EngineFunction", points[kind].load())
