"""The options of one accelerator, resolved from its arguments, plugins and handlers, and the cell's configuration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accel_nb.accelerator.options.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_nb.accelerator.options.plugins import (
    DeepSpeedPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    argument_or_field,
    checked_handlers,
    option_layers,
)
from accel_nb.config import Resolved, current_config, current_layers, environment_layer, resolve
from accel_nb.config.schema import OPTIONS, STRATEGIES, Config
from accel_nb.errors import ConfigError
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.world import World
from accel_nb.telemetry.trackers import GeneralTracker
from accel_nb.telemetry.trackers.selection import parse_log_with


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved options, and the arguments that are not options: folders, profiling, trackers, a sharding plugin."""

    resolved: Resolved
    project: ProjectConfiguration
    profile: ProfileKwargs
    trackers: tuple[str | GeneralTracker, ...]
    sharding_plugin: FullyShardedDataParallelPlugin | DeepSpeedPlugin | None
    """The plugin that selects FSDP or DeepSpeed, if there is one."""

    @property
    def options(self) -> Config:
        """The resolved options."""
        return self.resolved.config

    def ignores_sharding(self, world: World) -> bool:
        """Return whether the strategy of a plugin is not used because there is one worker; warns if so."""
        if self.sharding_plugin is None or world.size > 1:
            return False
        given = self.sharding_plugin.as_options()
        unused = [name for name in given if name == "strategy" or OPTIONS[name].section in STRATEGIES]
        applied = [name for name in given if name not in unused]
        warnings.warn(
            f"{type(self.sharding_plugin).__name__}(...) shards a model among workers, and there is one worker. "
            f"Without an effect: {', '.join(unused) or 'nothing'}; applied: {', '.join(applied) or 'nothing'}",
            stacklevel=4,
        )
        return True


def read_settings(
    arguments: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    step_scheduler_with_optimizer: bool | None,
    handlers: Sequence[Any] | None,
    plugins: Sequence[Any],
    project: ProjectConfiguration | None,
    project_dir: str | os.PathLike[str] | None,
    sharding_plugin: FullyShardedDataParallelPlugin | DeepSpeedPlugin | None,
    log_with: Any,
) -> Settings:
    """Resolve the options of an accelerator.

    Args:
        arguments: Values by option name; None where an argument was not given.
        config: Further options by name, or the path of a YAML file.
        step_scheduler_with_optimizer: False sets the option ``schedule`` to ``calls``.
        handlers: The objects of the argument ``kwargs_handlers``, at most one of each class.
        plugins: Objects whose fields are options, and None for those that were not given.
        project: Folders of the run.
        project_dir: Folder of the run; an error if ``project`` names another.
        sharding_plugin: The one of ``plugins`` that selects a strategy.
        log_with: Trackers, by name or as objects.

    Raises `ConfigError` for values that are not allowed and for arguments that contradict each other.
    """
    checked = checked_handlers(handlers)
    project = project or ProjectConfiguration()
    folder = argument_or_field("project_dir", project_dir, "ProjectConfiguration.project_dir", project.project_dir)
    project = replace(project, project_dir=folder)
    trackers = parse_log_with(log_with)
    given = {**arguments, "schedule": "calls" if step_scheduler_with_optimizer is False else None}
    resolved = _resolve(config, given, [*plugins, project, *checked])
    if step_scheduler_with_optimizer and resolved.config.schedule == "calls":
        raise ConfigError(
            "step_scheduler_with_optimizer=True from Accelerator(...) and schedule=calls from "
            f"{resolved.origins['schedule']} disagree; remove one of the two"
        )
    profile = next((item for item in checked if isinstance(item, ProfileKwargs)), ProfileKwargs())
    return Settings(resolved, project, profile, trackers, sharding_plugin)


def _resolve(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, arguments: Mapping[str, Any], plugins: Sequence[Any]
) -> Resolved:
    if isinstance(config, str | os.PathLike):
        config = {"config": os.fspath(config)}
    own = option_layers(config, arguments, plugins)
    if not own and (of_cell := current_config()) is not None:
        return of_cell
    return resolve([*(current_layers() or [environment_layer(option_variables())]), *own])
