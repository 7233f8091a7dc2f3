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
    """Return the micro-batches of a step; raises ValueError if the argument and the plugin have different numbers."""
    if given == 1:
        given = int(get_variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"))
    if plugin is None or plugin.num_steps is None:
        return given
    if given not in (1, plugin.num_steps):
        raise ValueError(
            f"gradient_accumulation_steps={given} and num_steps={plugin.num_steps} of gradient_accumulation_plugin "
            "disagree; give one"
        )
    return plugin.num_steps


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
