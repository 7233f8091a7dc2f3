"""Construction of models on the meta device, from a Python path or a transformers config. Imports torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.checkpoint.layout import parse_json
from accel_nb.errors import ConfigError, CorruptCheckpoint, MisuseError
from accel_nb.forecast.measurement import Loss, measure_activations, measure_model
from accel_nb.forecast.memory import Activations
from accel_nb.forecast.mesh_measurement import measure_mesh
from accel_nb.forecast.meshes import MeshSizes
from accel_nb.forecast.plans import Forecast, RunSetting, forecast
from accel_nb.forecast.request import InputSpec
from accel_nb.forecast.sizes import ModelSizes, with_optimizer
from accel_nb.runtime.rng import fork_rng

MAX_CONFIG_BYTES = 1 << 20
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def model_from_path(path: str, folder: Path) -> nn.Module:
    """Return the module ``package.module:name``, or the result of calling it without arguments.

    ``folder`` is first in the search path, as with ``python -m``. The weights are on the meta device. Raises
    `ConfigError`.
    """
    module_name, _, name = path.partition(":")
    sys.path.insert(0, str(folder))
    try:
        with torch.device("meta"):
            found: Any = importlib.import_module(module_name)
            for part in name.split("."):
                found = getattr(found, part)
            model = found if isinstance(found, nn.Module) else found()
    except Exception as error:  # any error of the user's module
        raise ConfigError(
            f"{path[:200]!a} gives no model: {type(error).__name__}: {error}; "
            "name a module, or a class or function that creates one without arguments"
        ) from error
    finally:
        sys.path.remove(str(folder))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{path[:200]!a} is a {type(model).__name__}; name a torch module, or a function that creates one"
        )
    return model


def model_from_config(path: Path) -> nn.Module:
    """Build a transformers model from its config.json; nothing is downloaded, and no code of a repository is run.

    Raises `ConfigError`.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: it is not the config.json of a model")
    try:
        values = parse_json(text, str(path))
    except CorruptCheckpoint as error:
        raise ConfigError(str(error)) from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{path} has no model_type: it is not the config.json of a transformers model")
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"{path} describes a transformers model: pip install transformers") from None
    try:
        return _from_transformers(transformers, kind, values)
    except Exception as error:  # any error that a wrong config causes
        raise ConfigError(f"transformers cannot build a model from {path}: {type(error).__name__}: {error}") from error


def _from_transformers(library: Any, kind: str, values: dict[str, Any]) -> nn.Module:
    kept = {name: value for name, value in values.items() if name not in ("model_type", "auto_map")}
    config = library.AutoConfig.for_model(kind, **kept)
    names = values.get("architectures") or []
    architecture = getattr(library, names[0], None) if names and isinstance(names[0], str) else None
    with torch.device("meta"):
        if isinstance(architecture, type) and issubclass(architecture, library.PreTrainedModel):
            return architecture(config)
        return library.AutoModel.from_config(config)


def make_batch(inputs: Sequence[InputSpec], label: InputSpec | None) -> Any:
    """Return a batch of one sample on the meta device, as a loader would yield it; None for no inputs."""
    if not inputs:
        return None
    if inputs[0].name is not None:
        return {sample.name: _empty_tensor(sample) for sample in inputs}
    return _empty_tensor(inputs[0]) if label is None else (_empty_tensor(inputs[0]), _empty_tensor(label))


def sample_of(loader: DataLoader[Any]) -> tuple[Any, int | None]:
    """Return a batch of one sample, and the loader's batch size; the loader's order and random state do not change.

    Raises `ConfigError` if the data yield no sample.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    with fork_rng():
        try:
            data: Any = loader.dataset
            first = data[0] if hasattr(data, "__getitem__") else next(iter(data))
            return loader.collate_fn([first]), size
        except Exception as error:  # any error of the user's dataset
            raise ConfigError(
                f"no sample can be read from the loader's data: {type(error).__name__}: {error}; "
                "name another loader, or a batch, with --data NAME"
            ) from error


def _empty_tensor(sample: InputSpec) -> torch.Tensor:
    return torch.empty((1, *sample.shape), dtype=getattr(torch, sample.dtype), device="meta")


def forecast_model(
    model: nn.Module,
    setting: RunSetting,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | str = "adamw",
    batch: Any = None,
    loss: Loss | None = None,
    itemsize: int | None = None,
) -> Forecast:
    """Return a module's forecast; with a ``batch`` its activations are traced.

    They are those of ``setting.samples_per_rank`` samples. ``optimizer`` is a name, one optimizer or several.
    ``itemsize`` replaces that of the weights. The forecast's notes list parts that cannot be traced.
    """
    notes: list[str] = []
    meshes: list[MeshSizes] = []
    found = _sizes(model, optimizer, itemsize, notes, on_gpu=not setting.uses_host_memory)
    plain = checkpointed = None
    half = _HALF_DTYPES.get(setting.precision)
    for shape in [setting.mesh] if setting.mesh.size > 1 else setting.compared_meshes:
        held = measure_mesh(model, found, shape, setting, batch, loss=loss, half=half)
        if held.refusal is None or shape == setting.mesh:
            meshes.append(held)
    if setting.mesh.size > 1:
        return forecast(found, setting, meshes[0].activations, None, notes, meshes)
    if batch is None or not setting.samples_per_rank:
        notes.append("activations are not counted: no batch is known")
    else:
        try:
            plain = measure_activations(
                model, batch, setting.samples_per_rank, loss=loss, half=half, on_gpu=not setting.uses_host_memory
            )
            if any(weight.block for weight in found.weights):
                checkpointed = _measure_checkpointed(model, batch, setting, loss, half, notes)
        except MisuseError as error:
            notes.append(f"activations are not counted: {error}")
    return forecast(found, setting, plain, checkpointed, notes, meshes)


def _sizes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | str,
    itemsize: int | None,
    notes: list[str],
    *,
    on_gpu: bool,
) -> ModelSizes:
    if not isinstance(optimizer, str):
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        try:
            return measure_model(model, *optimizers, on_gpu=on_gpu)
        except MisuseError as error:
            notes.append(f"{error}; counted as adamw")
            optimizer = "adamw"
    found = measure_model(model)
    if itemsize is not None:
        found = replace(found, weights=tuple(replace(weight, itemsize=itemsize) for weight in found.weights))
    return with_optimizer(found, optimizer)


def _measure_checkpointed(
    model: nn.Module, batch: Any, setting: RunSetting, loss: Loss | None, half: torch.dtype | None, notes: list[str]
) -> Activations | None:
    try:
        return measure_activations(
            model,
            batch,
            setting.samples_per_rank,
            loss=loss,
            half=half,
            checkpoints=True,
            on_gpu=not setting.uses_host_memory,
        )
    except MisuseError as error:
        notes.append(f"activation checkpointing is not counted: {error}")
        return None
