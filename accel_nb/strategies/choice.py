"""Choice of a strategy for a world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from accel_nb.config.schema import Config
from accel_nb.errors import ConfigError
from accel_nb.precision.policy import Precision
from accel_nb.runtime.world import World
from accel_nb.strategies.base import LayerDividing, Stages, Strategy
from accel_nb.strategies.registry import StrategyRegistry

AUTO = "auto"


def choose(requested: str, world: World, registry: StrategyRegistry) -> type[Strategy]:
    """Return the strategy class to run with in this world.

    ``auto`` chooses the strategy of the highest ``priority`` among those that can run. Raises `ConfigError` if the
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
    installed = map(registry.get, registry.names)
    for strategy in sorted(installed, key=lambda strategy: strategy.capabilities.priority, reverse=True):
        if strategy.capabilities.fits(world):
            return strategy
    reasons = [f"{name}: {registry.get(name).capabilities.reason_against(world)}" for name in registry.names]
    raise ConfigError(f"no installed strategy supports {world.size} workers on {world.device} ({'; '.join(reasons)})")


def build(requested: str, config: Config, world: World, registry: StrategyRegistry) -> StrategyBuilder:
    """Return the builder of the strategy ``requested`` for this world, with the config's options.

    If layers, sequences, blocks or experts are divided (``mesh.tp``, ``mesh.cp``, ``mesh.pp``, ``mesh.ep``), a strategy
    that can do so replaces one with replicas. Raises `ConfigError` if the strategy cannot run, or cannot divide layers.
    """
    degrees = {name: getattr(config.mesh, name) for name in ("tp", "cp", "pp", "ep")}
    divided = " x ".join(f"mesh.{name} {degree}" for name, degree in degrees.items() if degree > 1)
    if not divided:
        return StrategyBuilder(choose(requested, world, registry), config)
    able = [name for name in registry.names if registry.get(name).capabilities.divides_layers]
    usable = [name for name in able if registry.get(name).capabilities.fits(world)]
    wanted = None if requested == AUTO else registry.get(requested)
    if wanted is None or wanted.capabilities.replicates or not wanted.capabilities.divides_layers:
        if not usable or not (wanted is None or wanted.capabilities.replicates):
            copies = [name for name in registry.names if registry.get(name).capabilities.replicates]
            raise ConfigError(
                f"{divided} cannot be combined with strategy {requested!r} on {world.device}; "
                f"layers are divided with {', '.join([AUTO, *copies, *able])}"
            )
        return StrategyBuilder(registry.get(usable[0]), config, replicates=True)
    return StrategyBuilder(choose(requested, world, registry), config)


class StrategyBuilder:
    """A strategy's class, and the sizes of the mesh by which it divides models."""

    def __init__(self, kind: type[Strategy], config: Config, *, replicates: bool = False) -> None:
        self.kind = kind
        self._config = config
        self._replicates = replicates

    def build(self, precision: Precision) -> Strategy:
        """Return the strategy, which is not opened yet."""
        strategy = self.kind(getattr(self._config, self.kind.name, None), precision)
        mesh = self._config.mesh
        if mesh.tp > 1:
            cast(LayerDividing, strategy).divide_layers(mesh.tp, replicates=self._replicates)
        if mesh.cp > 1:
            cast(LayerDividing, strategy).divide_sequences(mesh.cp, replicates=self._replicates)
        if mesh.ep > 1:
            cast(LayerDividing, strategy).divide_experts(mesh.ep, replicates=self._replicates)
        if mesh.pp > 1:
            stages = Stages(mesh.pp, mesh.stages_per_rank, mesh.micro_batches, mesh.split_points)
            cast(LayerDividing, strategy).divide_stages(stages, replicates=self._replicates)
        return strategy


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with the options of these dotted names replaced."""
    for name, value in options.items():
        section, _, leaf = name.rpartition(".")
        if section:
            value = getattr(config, section).model_copy(update={leaf: value})
        config = config.model_copy(update={section or leaf: value})
    return config
