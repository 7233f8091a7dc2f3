"""Files of sharded models and optimizers, with accelerate's names, as transformers' Trainer writes and reads them.

The files hold whole tensors, which are gathered one at a time and written by the first process. They are loaded on any
number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_nb.accelerator import Accelerator
from accel_nb.checkpoint.convert import merge
from accel_nb.checkpoint.full_tensors import gather_weights
from accel_nb.checkpoint.shared_errors import run_on_all, run_on_main
from accel_nb.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accel_nb.compat.states import PartialState
from accel_nb.strategies.base import Bundle


def _file(folder: str | os.PathLike[str], name: str, index: int) -> Path:
    return Path(folder) / (f"{name}.bin" if index == 0 else f"{name}_{index}.bin")


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's whole weights; with ``adapter_only`` those that train. Every process must call.

    ``fsdp_plugin`` and ``use_dcp`` are ignored: the file does not depend on how the model is sharded.
    """
    found = accelerator.get_state_dict(model)
    if adapter_only:
        parameters = model.named_parameters(remove_duplicate=False)  # a tied weight has each of its names
        trained = {name for name, value in parameters if value.requires_grad}
        found = {name: value for name, value in found.items() if name in trained}
    _write(accelerator, found, _file(output_dir, FSDP_MODEL_NAME, model_index))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` has written into a prepared model. Every process must call."""
    values = _read(accelerator, _file(input_dir, FSDP_MODEL_NAME, model_index))
    if adapter_only:
        unknown = values.keys() - model.state_dict().keys()
        if unknown:
            raise ValueError(f"{input_dir} has weights that this model does not have: {', '.join(sorted(unknown))}")
        values = {**accelerator.get_state_dict(model), **values}
    _load(accelerator, Bundle((model,)), models=[values])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the whole state of a prepared optimizer. Every process must call; ``model`` has no effect."""
    parts = accelerator.components
    found = parts.strategy.read_state(Bundle((), (optimizer,)), copied=False)["optimizers"][0]
    flat = {f"{index} {key}": value for index, state in found["state"].items() for key, value in state.items()}
    whole: dict[int, dict[str, Any]] = {index: {} for index in found["state"]}
    for name, value in gather_weights(flat, parts.comm):
        index, _, key = name.partition(" ")
        whole[int(index)][key] = value
    _write(accelerator, {**found, "state": whole}, _file(output_dir, OPTIMIZER_NAME, optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` has written into a prepared optimizer. Every process must call.

    ``model`` and ``adapter_only`` have no effect.
    """
    values = _read(accelerator, _file(input_dir, OPTIMIZER_NAME, optimizer_index))
    _load(accelerator, Bundle((), (optimizer,)), optimizers=[values])


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the shards of a folder, which FSDP or ``torch.distributed.checkpoint`` has saved, into one file.

    The first process merges; every process must call, and each raises its error. The file is ``model.safetensors``, or
    ``pytorch_model.bin`` without ``safe_serialization``. Raises `CheckpointError` for a folder that is damaged or holds
    no model's weights.
    """
    run_on_main(
        PartialState()._comm,
        lambda: merge(
            checkpoint_dir, output_path, as_safetensors=safe_serialization, removes_shards=remove_checkpoint_dir
        ),
    )


def _write(accelerator: Accelerator, values: Mapping[str, Any], path: Path) -> None:
    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(values), path)

    run_on_main(accelerator.components.comm, write)


def _read(accelerator: Accelerator, path: Path) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; accel-nb merge-weights merges a folder of shards that accelerate has written "
                "into one file"
            )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    return run_on_all(accelerator.components.comm, read)


def _load(accelerator: Accelerator, bundle: Bundle, **values: list[Any]) -> None:
    strategy = accelerator.components.strategy
    empty: dict[str, Any] = {"models": [], "optimizers": [], "schedulers": []}
    strategy.write_state(bundle, {**empty, **values, "precision": strategy.precision.state_dict()})
