"""Arguments of `Accelerator` that were not given: the launcher's variables and accelerate's defaults apply."""

from __future__ import annotations

import os
from typing import Any

from accel_nb.compat.hf_utils import parse_flag_from_env
from accel_nb.compat.plugins import GradientAccumulationPlugin, ProjectConfiguration
from accel_nb.config import current_layers, environment_layer
from accel_nb.runtime.process.environment import get_variable, option_variables


def project_of(given: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None) -> ProjectConfiguration:
    """Return the folders of the run, with ``project_dir`` unless ``given`` has one."""
    if given is None:
        return ProjectConfiguration(project_dir=project_dir)
    if not isinstance(given, ProjectConfiguration):
        given = ProjectConfiguration(**vars(given))
    if project_dir is not None and given.project_dir is None:
        given.set_directories(project_dir)
    return given


def precision_of(given: Any) -> Any:
    """Return the precision that is given or set by the launcher's variable, in lower case."""
    found = given or get_variable("ACCELERATE_MIXED_PRECISION", None)
    return found.lower() if isinstance(found, str) else found


def accumulation_steps(given: int, plugin: GradientAccumulationPlugin | None) -> int:
    """Return the micro-batches of a step; raises ValueError if the places that set them have different numbers.

    They are set by the argument, by the launcher's variable, and by the plugin; 1 is the default of the first two.
    """
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    values = {"gradient_accumulation_steps": given, f"the variable {variable}": int(get_variable(variable, "1"))}
    values = {name: value for name, value in values.items() if value != 1}
    if plugin is not None and plugin.num_steps is not None:
        values["num_steps of gradient_accumulation_plugin"] = plugin.num_steps
    if len(set(values.values())) > 1:
        raise ValueError(f"{', '.join(f'{name}={value}' for name, value in values.items())} disagree; give one")
    return next(iter(values.values()), 1)


def add_defaults(config: Any, step_scheduler_with_optimizer: bool) -> Any:
    """Return the options with accelerate's defaults for those that are set nowhere."""
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") and not is_set("debug", config):
        config = {**(config or {}), "debug": True}
    if step_scheduler_with_optimizer and not is_set("schedule", config):
        # Scripts compute a schedule from the length of a loader before it is divided.
        config = {**(config or {}), "schedule": "samples"}
    return config


def is_set(name: str, config: Any) -> bool:
    """Return whether an option is set by the code, by a cell's flags, by a file or by the environment."""
    if isinstance(config, str | os.PathLike):
        return True
    layers = current_layers() or (environment_layer(option_variables()),)
    return name in (config or {}) or any(name in layer.values for layer in layers)
