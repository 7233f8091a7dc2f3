"""Choice of a strategy for a world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_nb.config.schema import Config
from accel_nb.errors import ConfigError
from accel_nb.runtime.world import World
from accel_nb.strategies.base import Strategy
from accel_nb.strategies.registry import StrategyRegistry

AUTO = "auto"


def choose(requested: str, world: World, registry: StrategyRegistry) -> type[Strategy]:
    """Return the strategy class to run with in this world.

    ``auto`` chooses the strategy of the highest ``rank`` among those that can run. Raises `ConfigError` if the
    requested strategy, or with ``auto`` every strategy, cannot run.
    """
    if requested != AUTO:
        chosen = registry.get(requested)
        reason = chosen.capabilities.reason_against(world)
        if reason is not None:
            fitting = [name for name in registry.names if registry.get(name).capabilities.fits(world)]
            raise ConfigError(
                f"strategy {requested!r} cannot run here: {reason}; "
                f"use {' or '.join([AUTO, *fitting])}, or change the number of workers"
            )
        return chosen
    ranked = sorted(map(registry.get, registry.names), key=lambda strategy: strategy.capabilities.rank, reverse=True)
    for strategy in ranked:
        if strategy.capabilities.fits(world):
            return strategy
    reasons = [f"{name}: {registry.get(name).capabilities.reason_against(world)}" for name in registry.names]
    raise ConfigError(f"no installed strategy serves {world.size} workers on {world.device} ({'; '.join(reasons)})")


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with the options of these dotted names replaced."""
    for name, value in options.items():
        section, _, leaf = name.rpartition(".")
        if section:
            value = getattr(config, section).model_copy(update={leaf: value})
        config = config.model_copy(update={section or leaf: value})
    return config
