"""``accel-nb estimate``: the memory that training needs on each device; starts and downloads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_nb.cli.command_failed import CommandFailed
from accel_nb.errors import ConfigError
from accel_nb.forecast.header import read_safetensors
from accel_nb.forecast.plans import Forecast, RunSetting, forecast
from accel_nb.forecast.request import ForecastRequest, find_setting, read_request
from accel_nb.forecast.sizes import with_optimizer
from accel_nb.forecast.table import render
from accel_nb.pool.device_assignment import assign_devices
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.process.hardware import inspect_machine
from accel_nb.runtime.safetensors_header import SUFFIX


class NothingFits(CommandFailed):
    """No plan fits; the message is the whole table."""


def run(words: Sequence[str]) -> str:
    """Return the table. Raise `NothingFits` with the table if no plan fits, and `ConfigError` for wrong input."""
    request = read_request(words, "accel-nb estimate", in_notebook=False)
    config = request.config(option_variables())
    setting = find_setting(
        request.other_devices(config) or [spec.device for spec in assign_devices(gpus=config.gpus, cpus=config.cpus)],
        inspect_machine(),
        config,
        batch_size=request.batch_size or (1 if request.inputs else 0),
        memory=request.memory,
    )
    result = _forecast(request, setting)
    text = render(result, request.output_format)
    if result.best is None:
        raise NothingFits(text.rstrip("\n"))
    return text


def _forecast(request: ForecastRequest, setting: RunSetting) -> Forecast:
    target = request.target or ""
    path = Path(target)
    if target.endswith(SUFFIX) or path.is_dir():
        return _from_header(request, path, setting)
    from accel_nb.forecast.model_building import forecast_model, make_batch, model_from_config, model_from_path

    if target.endswith(".json"):
        model = model_from_config(path)
    elif ":" in target:
        model = model_from_path(target, Path.cwd())
    else:
        raise ConfigError(
            f"accel-nb estimate: {target[:200]!a} is not a model; give package.module:name, a *{SUFFIX} file or a "
            "folder of them, or the config.json of a transformers model"
        )
    return forecast_model(
        model,
        setting,
        optimizer=request.optimizer or "adamw",
        batch=make_batch(request.inputs, request.label),
        itemsize=request.itemsize,
    )


def _from_header(request: ForecastRequest, path: Path, setting: RunSetting) -> Forecast:
    if request.inputs:
        raise ConfigError(f"accel-nb estimate: {path} has weights and no code, so inputs have no effect; remove them")
    model = read_safetensors(path)
    if request.itemsize is not None:
        model = replace(model, weights=tuple(replace(weight, itemsize=request.itemsize) for weight in model.weights))
    note = "activations are not counted: the file has weights and no code"
    return forecast(with_optimizer(model, request.optimizer or "adamw"), setting, notes=[note])
