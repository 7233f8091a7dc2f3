"""Registry of strategies: each is one entry point of the group ``accel_nb.strategies``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from accel_nb.config.installed import STRATEGY_GROUP, installed_entry_points
from accel_nb.errors import ConfigError
from accel_nb.strategies.base import Strategy


@cache
def _load(point: EntryPoint) -> type[Strategy]:
    strategy: Any = point.load()
    return strategy


class StrategyRegistry:
    """The installed strategies by name; the module of a strategy is imported by `get`."""

    def __init__(self, points: Iterable[EntryPoint] | None = None) -> None:
        found = installed_entry_points(STRATEGY_GROUP) if points is None else points
        self._points: Mapping[str, EntryPoint] = {point.name: point for point in found}

    @property
    def names(self) -> list[str]:
        """The names of the installed strategies, sorted."""
        return sorted(self._points)

    def get(self, name: str) -> type[Strategy]:
        """Return the strategy's class; raises `ConfigError` for a name that is not installed."""
        if name not in self._points:
            known = ", ".join(self.names) or "none: the package is not installed; run pip install -e ."
            raise ConfigError(f"strategy {name!r} is unknown; installed are {known}")
        return _load(self._points[name])
