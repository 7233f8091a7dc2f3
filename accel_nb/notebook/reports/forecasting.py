"""Forecasts for a notebook's model, optimizer and loader, found by name or because there is only one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from accel_nb.config import Config
from accel_nb.config.message_text import did_you_mean
from accel_nb.errors import ConfigError
from accel_nb.forecast.plans import Forecast
from accel_nb.forecast.request import ForecastRequest, find_setting
from accel_nb.runtime.process.hardware import inspect_machine

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def forecast_notebook(
    request: ForecastRequest, names: Mapping[str, Any], config: Config, devices: Sequence[str]
) -> Forecast | None:
    """Return the forecast for a model of the notebook; None if none is named and there is not exactly one.

    One sample of a loader's dataset is read; the random number generators are restored. Raises `ConfigError` for names
    that the notebook lacks or that refer to objects of other types.
    """
    if request.target is None and "torch" not in sys.modules:
        return None
    model = _find_model(request, names)
    if model is None:
        return None
    from accel_nb.forecast.model_building import forecast_model
    from accel_nb.forecast.strategy_support import check_refusals

    batch, batch_size = _find_batch(request, names)
    setting = find_setting(devices, inspect_machine(), config, batch_size=batch_size, memory=request.memory)
    optimizer = _find_optimizer(request, names, model)
    found = forecast_model(model, setting, optimizer=optimizer, batch=batch, loss=_find_loss(request, names))
    optimizers = [] if isinstance(optimizer, str) else optimizer if isinstance(optimizer, list) else [optimizer]
    return check_refusals(found, [model], optimizers, config)


def _find_model(request: ForecastRequest, names: Mapping[str, Any]) -> nn.Module | None:
    from torch import nn

    if request.target is not None:
        found = _find_name(names, request.target, "the model")
        if not isinstance(found, nn.Module):
            raise ConfigError(f"{request.target} is a {type(found).__name__}; name a torch module")
        return found
    modules = {id(value): value for value in names.values() if isinstance(value, nn.Module)}
    inner = {id(part) for module in modules.values() for part in islice(module.modules(), 1, None)}
    outer = [value for key, value in modules.items() if key not in inner and next(value.parameters(), None) is not None]
    return outer[0] if len(outer) == 1 else None


def _find_loss(request: ForecastRequest, names: Mapping[str, Any]) -> Any:
    if request.loss is None:
        return None
    found = _find_name(names, request.loss, "--loss")
    if not callable(found):
        raise ConfigError(f"--loss {request.loss} is a {type(found).__name__}; name a function of output and batch")
    return found


def _find_optimizer(
    request: ForecastRequest, names: Mapping[str, Any], model: nn.Module
) -> Optimizer | list[Optimizer] | str:
    from torch.optim import Optimizer

    if request.optimizer is not None:
        found = names.get(request.optimizer)
        return found if isinstance(found, Optimizer) else request.optimizer
    own = {id(parameter) for parameter in model.parameters()}
    found = {
        id(value): value
        for value in names.values()
        if isinstance(value, Optimizer) and own & {id(p) for group in value.param_groups for p in group["params"]}
    }
    return list(found.values()) or "adamw"


def _find_batch(request: ForecastRequest, names: Mapping[str, Any]) -> tuple[Any, int]:
    """Return a batch and its number of samples; None as the batch if there is neither ``--data`` nor one loader."""
    from torch.utils.data import DataLoader

    from accel_nb.forecast.model_building import sample_of
    from accel_nb.runtime.tensors.nested import first_batch_size

    if request.data is not None:
        data = _find_name(names, request.data, "--data")
    else:
        loaders = {id(value): value for value in names.values() if isinstance(value, DataLoader)}
        data = next(iter(loaders.values())) if len(loaders) == 1 else None
    if data is None:
        return None, request.batch_size or 0
    batch, size = sample_of(data) if isinstance(data, DataLoader) else (data, None)
    size = request.batch_size or size or first_batch_size(batch)
    if size is None:
        raise ConfigError(f"--data {request.data} is a {type(data).__name__} without tensors; name a loader or a batch")
    return batch, size


def _find_name(names: Mapping[str, Any], name: str, error_prefix: str) -> Any:
    """Return the object that a name refers to; the error for an unknown name begins with ``error_prefix``."""
    if name not in names:
        public = [other for other in names if not other.startswith("_")]
        raise ConfigError(f"{error_prefix}: the notebook has no name {name[:80]!a}{did_you_mean(name, public)}")
    return names[name]
